"""Constraints made ready over the link, with the service in this process: beside steps, bounded, harmless to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from fakes import echo_worker
from grpc_health.v1 import health_pb2, health_pb2_grpc

from workers import client as client_module
from workers import server as server_module
from workers import wire
from workers.channel import make_channel
from workers.client import LinkBroken, WorkerClient
from workers.demands import MAX_PREPARING, Constraint
from workers.plan import WorkerError, WorkerLost
from workers.server import NUM_THREADS, SERVICE_NAME

EPOCH = 7
ACT_TIMEOUT_S = 10
"""Nothing here takes a second; what waits for ever fails by then."""
GOOD, WAITS, CRASHES = (Constraint(kind="regex", text=text) for text in ("", "wait", "crash"))


@pytest.fixture
def address() -> Iterator[str]:
    echo_worker.GATE.clear()
    echo_worker.READY.clear()
    server, address = echo_worker.serve(EPOCH)
    yield address
    echo_worker.GATE.set()
    server.stop(None).wait()


def linked(address: str, act: Callable[[WorkerClient], Awaitable[None]]) -> None:
    """Runs `act` on a loaded link, which can still do a step afterwards."""

    async def run() -> None:
        client = WorkerClient(address, echo_worker.TERMS)
        try:
            async with asyncio.timeout(ACT_TIMEOUT_S):
                await client.load(echo_worker.settings(), lambda *_: None)
                await act(client)
                echo_worker.GATE.set()
                assert not client.lost.done()
                assert (await step(client, 99)).step_id == 99
        finally:
            echo_worker.GATE.set()
            await client.close()

    asyncio.run(run())


async def step(client: WorkerClient, step_id: int, uid: int | None = None) -> object:
    plan = echo_worker.plan(step_id, EPOCH, uid)
    return await client.execute(plan, wire.encode_plan(plan))


async def compiling(client: WorkerClient, count: int) -> list[asyncio.Task[str]]:
    """So many constraints that wait for the gate; as many of them as may be are with the rank."""
    tasks = [asyncio.create_task(client.prepare(WAITS)) for _ in range(count)]
    for _ in range(min(count, MAX_PREPARING)):
        await asyncio.to_thread(echo_worker.PREPARING.acquire)
    return tasks


def test_a_constraint_is_made_ready_or_the_rank_says_why_not(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        assert await client.prepare(GOOD) == ""
        problem = "line 3: ü\nsecond line"
        assert await client.prepare(Constraint(kind="lark", text=problem)) == f"{problem} at rank 0"

    linked(address, act)


def test_steps_go_on_while_a_constraint_is_compiled_and_the_other_way_round(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        (compiled,) = await compiling(client, 1)
        await step(client, 1)
        assert not compiled.done()
        waiting = asyncio.create_task(step(client, 2, echo_worker.UID_WAITS))
        await asyncio.to_thread(echo_worker.WAITING.wait)
        assert await client.prepare(GOOD) == ""
        assert not waiting.done()
        echo_worker.GATE.set()
        await waiting
        assert await compiled == ""

    linked(address, act)


def test_what_a_rank_fails_on_is_a_problem_of_the_constraint_alone(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        assert await client.prepare(CRASHES) == "it cannot be compiled: ArithmeticError: the grammar said no"
        assert await client.check_integrity() == ["0 steps"]

    linked(address, act)


def test_many_constraints_keep_no_step_no_check_and_no_health_waiting(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        tasks = await compiling(client, 2 * NUM_THREADS)
        for step_id in range(1, 4):
            await step(client, step_id)
        assert await client.check_integrity() == ["3 steps"]
        assert await asyncio.to_thread(health, address) == health_pb2.HealthCheckResponse.SERVING
        assert not echo_worker.PREPARING.acquire(blocking=False), "the others wait in the runtime"
        echo_worker.GATE.set()
        assert await asyncio.gather(*tasks) == [""] * len(tasks)
        while echo_worker.PREPARING.acquire(blocking=False):
            pass

    linked(address, act)


def test_a_constraint_that_takes_too_long_is_a_problem_and_the_link_lives_on(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PREPARE_TIMEOUT_S", 0.05)

    async def act(client: WorkerClient) -> None:
        (slow,) = await compiling(client, 1)
        assert await slow == "it takes longer than 0.05 s to compile; make it smaller"
        await step(client, 1)

    linked(address, act)


def test_a_rank_full_of_what_nobody_waits_for_says_so_and_is_free_again_in_time(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "COMPILER_WAIT_S", 0.05)

    async def act(client: WorkerClient) -> None:
        abandoned = await compiling(client, MAX_PREPARING)
        for task in abandoned:
            task.cancel()
        await asyncio.wait(abandoned)
        with pytest.raises(WorkerError, match=f"{MAX_PREPARING} other constraints are being compiled") as caught:
            await client.prepare(GOOD)
        assert not isinstance(caught.value, WorkerLost)
        await step(client, 1)
        echo_worker.GATE.set()
        monkeypatch.setattr(server_module, "COMPILER_WAIT_S", ACT_TIMEOUT_S)
        assert await client.prepare(GOOD) == ""

    linked(address, act)


def test_what_is_ready_does_not_wait_behind_what_is_compiled(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the rank has it ready no more: then it waits like the others."""
    monkeypatch.setattr(server_module, "COMPILER_WAIT_S", 0.05)
    ready = Constraint(kind="choice", text="")

    async def act(client: WorkerClient) -> None:
        assert await client.prepare(ready) == ""
        under_way = await compiling(client, 2 * MAX_PREPARING)
        echo_worker.READY.add(ready.text)
        for _ in range(3):
            assert await client.prepare(ready) == ""
        echo_worker.READY.clear()
        waiting = asyncio.create_task(client.prepare(ready))
        await asyncio.wait([waiting], timeout=0.2)
        assert not waiting.done()
        echo_worker.GATE.set()
        assert await asyncio.gather(*under_way, waiting) == [""] * (2 * MAX_PREPARING + 1)
        while echo_worker.PREPARING.acquire(blocking=False):
            pass

    linked(address, act)


def test_a_link_that_is_closed_prepares_nothing_and_says_so(address: str) -> None:
    async def run() -> None:
        client = WorkerClient(address, echo_worker.TERMS)
        await client.load(echo_worker.settings(), lambda *_: None)
        async with asyncio.timeout(ACT_TIMEOUT_S):
            under_way = await compiling(client, MAX_PREPARING + 2)
            await client.close()
            outcomes = await asyncio.gather(*under_way, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [LinkBroken] * len(under_way)
            with pytest.raises(LinkBroken, match="closed the link"):
                await client.prepare(GOOD)

    asyncio.run(run())


def test_a_rank_that_is_not_loaded_or_has_failed_prepares_nothing(address: str) -> None:
    async def run() -> None:
        client = WorkerClient(address, echo_worker.TERMS)
        with pytest.raises(WorkerLost, match="the worker is not loaded"):
            await client.prepare(GOOD)
        await client.load(echo_worker.settings(), lambda *_: None)
        with pytest.raises(WorkerLost):
            await step(client, 1, echo_worker.UID_RAISES)
        another = WorkerClient(address, echo_worker.TERMS)
        with pytest.raises(WorkerLost, match="the worker is unusable: ArithmeticError"):
            await another.prepare(GOOD)
        await another.close()
        await client.close()

    asyncio.run(run())


def health(address: str) -> int:
    with make_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5, metadata=echo_worker.TERMS.metadata).status
