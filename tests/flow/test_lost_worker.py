"""A rank that dies or hangs ends its streams with UNAVAILABLE within seconds; it is replaced without an operator."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import grpc
import pytest
from flow.house import House, open_house, request

STEP_TIMEOUT_S = 3.0
BOUND_S = 10.0
"""From the fault to the status of every stream."""


@pytest.fixture(scope="module", params=["process", pytest.param("ray", marks=pytest.mark.ray)])
def faulty_house(request: pytest.FixtureRequest) -> Iterator[House]:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    with open_house(cluster__launcher=request.param, cluster__step_timeout_s=STEP_TIMEOUT_S) as house:
        yield house


async def until_code(house: House, started: asyncio.Event) -> grpc.StatusCode:
    """Streams until an error; sets `started` at the first frame."""
    assert house.client is not None
    try:
        async for _ in house.client.generate(request("import sys\n", 480, ignore_eos=True)):
            started.set()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_end_and_service_returns(faulty_house: House, fault: signal.Signals) -> None:
    house = faulty_house
    house.set_policy(1)
    expected = house.run(house.generate(request("def f(", 12, ignore_eos=True))).ids

    async def run() -> tuple[list[grpc.StatusCode], float]:
        flags = [asyncio.Event() for _ in range(4)]
        streams = [asyncio.create_task(until_code(house, flag)) for flag in flags]
        await asyncio.gather(*(flag.wait() for flag in flags))
        launched = house.deployment.supervisor.launched
        assert launched is not None
        assert launched.pid is not None
        os.kill(launched.pid, fault)
        begin = time.monotonic()
        codes = await asyncio.gather(*streams)
        return list(codes), time.monotonic() - begin

    codes, seconds = house.run(run())
    assert codes == [grpc.StatusCode.UNAVAILABLE] * 4
    assert seconds < BOUND_S
    assert house.client is not None
    house.run(house.client.wait_ready("outrider.v1.InferenceService", 60))
    assert house.run(house.generate(request("def f(", 12, ignore_eos=True))).ids == expected
    house.check_baseline()


def test_an_idle_rank_that_dies_is_replaced(faulty_house: House) -> None:
    house = faulty_house
    launched = house.deployment.supervisor.launched
    assert launched is not None
    assert launched.pid is not None
    gone = asyncio.run_coroutine_threadsafe(_not_serving(house), house.loop)
    os.kill(launched.pid, signal.SIGKILL)
    gone.result(BOUND_S)
    assert house.client is not None
    house.run(house.client.wait_ready("outrider.v1.InferenceService", 60))
    assert len(house.run(house.generate(request("x", 5, ignore_eos=True))).ids) == 5


async def _not_serving(house: House) -> None:
    lost = asyncio.Event()
    house.deployment.engine.add_state_listener(lambda serving: None if serving else lost.set())
    if not house.deployment.engine.is_serving:
        return
    await lost.wait()
