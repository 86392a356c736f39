"""A rank that dies or hangs ends its streams with UNAVAILABLE within seconds; its group is replaced by itself.

Every layout, through Ray; faults at chosen moments of a step are in test_group_faults.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.supervised import is_gone
from flow.house import House, open_house, request
from oracles.days import by_day

from outrider.v1 import operator_pb2

STEP_TIMEOUT_S = 3.0
BOUND_S = 10.0
"""From the fault to the status of every stream."""


LAYOUTS: dict[str, dict[str, Any]] = {
    "process": {"cluster__launcher": "process"},
    "ray": {},
    "ray_tp2": {"parallel__tp": 2},
    "ray_tp2_ep2": {"parallel__tp": 2, "parallel__ep": 2},
    "ray_dp2_ep2": {"parallel__dp": 2, "parallel__ep": 2},
}


# One rank by either launcher, and a group a day through Ray; the others in the full run.
ONE = [pytest.param("process"), pytest.param("ray", marks=pytest.mark.ray)]
SEVERAL = by_day({name: name for name in LAYOUTS if "_" in name})


@pytest.fixture(scope="module", params=[*ONE, *SEVERAL])
def faulty_house(request: pytest.FixtureRequest) -> Iterator[House]:
    if request.param != "process":
        request.getfixturevalue("ray_cluster")
    settings = {"cluster__launcher": "ray", "cluster__step_timeout_s": STEP_TIMEOUT_S, **LAYOUTS[request.param]}
    with open_house(**settings) as house:
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


@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_streams_end_and_service_returns(faulty_house: House, fault: signal.Signals) -> None:
    house = faulty_house
    house.set_policy(1)
    expected = house.run(house.generate(request("def f(", 12, ignore_eos=True))).ids

    async def run() -> tuple[list[grpc.StatusCode], float]:
        flags = [asyncio.Event() for _ in range(4)]
        streams = [asyncio.create_task(until_code(house, flag)) for flag in flags]
        await asyncio.gather(*(flag.wait() for flag in flags))
        os.kill(house.deployment.supervisor.launched[-1].pid, fault)
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
    before = [launched.pid for launched in house.deployment.supervisor.launched]
    gone = asyncio.run_coroutine_threadsafe(_not_serving(house), house.loop)
    os.kill(before[0], signal.SIGKILL)
    gone.result(BOUND_S)
    assert house.client is not None
    house.run(house.client.wait_ready("outrider.v1.InferenceService", 60))
    assert len(house.run(house.generate(request("x", 5, ignore_eos=True))).ids) == 5
    assert all(map(is_gone, before))


@pytest.mark.parametrize(
    "faulty_house", [ONE[0], pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.full])], indirect=True
)
def test_who_waits_with_a_constraint_is_served_by_the_next_ranks(faulty_house: House) -> None:
    """They have compiled nothing, and the process that the old rank tried constraints in is gone with it."""
    house = faulty_house
    waiting = [request("x", 12, temperature=0.7, seed=seed) for seed in range(2)]
    for one, pattern in zip(waiting, ("[a-f]{4,8}", "[g-m]{4,8}"), strict=True):
        one.constraint.regex = pattern
    expected = [house.run(house.generate(one)).text for one in waiting]
    rank = house.deployment.supervisor.launched[0].pid
    children = children_of(rank)
    assert children

    async def run() -> list[str]:
        flags = [
            asyncio.Event()
            for _ in range(house.deployment.engine.mesh.dp * house.deployment.engine.description.num_slots)
        ]
        streams = [asyncio.create_task(until_code(house, flag)) for flag in flags]
        await asyncio.gather(*(flag.wait() for flag in flags))
        replies = [asyncio.create_task(house.generate(one)) for one in waiting]
        while house.deployment.statistics().waiting < len(waiting):
            await asyncio.sleep(0.01)
        os.kill(rank, signal.SIGKILL)
        assert set(await asyncio.gather(*streams)) == {grpc.StatusCode.UNAVAILABLE}
        return [reply.text for reply in await asyncio.gather(*replies)]

    assert house.run(run(), timeout_s=120) == expected
    assert all(map(is_gone, children))
    house.check_baseline()


def children_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def test_an_operator_is_answered_while_ranks_are_lost(faulty_house: House) -> None:
    """From the fault until they are back: each question, whatever it asks, and none waits for them."""
    house = faulty_house
    client = house.client
    assert client is not None

    async def ask_all() -> tuple[list[str], list[int]]:
        answers, states = [], []
        lost = asyncio.create_task(_not_serving(house))
        os.kill(house.deployment.supervisor.launched[-1].pid, signal.SIGKILL)
        while not (lost.done() and house.deployment.engine.is_serving):
            async with asyncio.timeout(BOUND_S / 2):
                states.append((await client.get_status()).state)
                await client.list_requests()
                try:
                    assert (await client.check_integrity()).violations == []
                    answers.append("OK")
                except grpc.aio.AioRpcError as error:
                    answers.append(error.code().name)
            await asyncio.sleep(0.02)
        return answers, states

    answers, states = house.run(ask_all())
    assert set(answers) <= {"OK", "UNAVAILABLE"}
    assert "UNAVAILABLE" in answers
    assert operator_pb2.SERVER_STATE_RECOVERING in states
    assert set(states) <= {operator_pb2.SERVER_STATE_RECOVERING, operator_pb2.SERVER_STATE_SERVING}
    assert house.run(client.check_integrity()).ranks_checked == len(house.deployment.ranks)
    house.check_baseline()


async def _not_serving(house: House) -> None:
    lost = asyncio.Event()
    house.deployment.engine.add_state_listener(lambda serving: None if serving else lost.set())
    if not house.deployment.engine.is_serving:
        return
    await lost.wait()
