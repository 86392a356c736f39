"""The link between runtime and rank: order, errors and ends, with the service in this process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from fakes import echo_worker
from grpc_health.v1 import health_pb2, health_pb2_grpc

from workers import wire
from workers.address import join_address
from workers.channel import LOOPBACK, bind, make_channel, make_server
from workers.client import LinkBroken, WorkerClient
from workers.main import factory_at
from workers.plan import LoadError, RankReport, StalePlan, StepPlan, WorkerLost
from workers.server import SERVICE_NAME, serve_worker

CHECKOUT = Path(__file__).parents[2]
EPOCH = 7
ACT_TIMEOUT_S = 10
"""Nothing here takes a second; what waits for ever fails by then."""


@pytest.fixture
def address() -> Iterator[str]:
    echo_worker.GATE.clear()
    echo_worker.WAITING.clear()
    server, address = echo_worker.serve(EPOCH)
    yield address
    echo_worker.GATE.set()  # a step that waits would keep the server from ending
    server.stop(None).wait()


def plan(step_id: int, *, uid: int | None = None, epoch: int = EPOCH) -> StepPlan:
    return echo_worker.plan(step_id, epoch, uid)


async def execute(client: WorkerClient, plan: StepPlan) -> RankReport:
    return await client.execute(plan, wire.encode_plan(plan))


def linked(address: str, act: Callable[[WorkerClient], Awaitable[None]]) -> None:
    """Runs `act` on a loaded link."""

    async def run() -> None:
        client = WorkerClient(address, echo_worker.TERMS)
        try:
            async with asyncio.timeout(ACT_TIMEOUT_S):
                await client.load(echo_worker.settings(), lambda *_: None)
                await act(client)
        finally:
            await client.close()

    asyncio.run(run())


def test_load_reports_progress_and_describes_the_worker(address: str) -> None:
    seen: list[tuple[str, int, int]] = []

    async def run() -> None:
        client = WorkerClient(address, echo_worker.TERMS)
        description = await client.load(echo_worker.settings(), lambda *frame: seen.append(frame))
        await client.close()
        assert description == echo_worker.EchoWorker.description

    asyncio.run(run())
    assert seen == [("config", 2, 2), ("weights", 2, 2), ("pools", 2, 2)]


def test_steps_come_back_in_order_though_several_are_in_flight(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        reports = await asyncio.gather(*(execute(client, plan(t)) for t in range(1, 9)))
        assert [report.step_id for report in reports] == list(range(1, 9))
        results = [report.batch for report in reports if report.batch is not None]
        assert [result.emitted[1][:3] for result in results] == [(5, 9, t) for t in range(1, 9)]
        assert results[3].drafted == ((4, 5, 6), ())
        assert reports[0].timings.commit_s == 0.125
        assert await client.check_integrity() == ["8 steps"]

    linked(address, act)


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [("badly", LoadError, echo_worker.LOAD_ERROR), ("crash", WorkerLost, "RuntimeError: the library threw")],
)
def test_the_text_of_a_failed_load_arrives_whole(address: str, path: str, error: type[Exception], text: str) -> None:
    async def run() -> None:
        client = WorkerClient(address, echo_worker.TERMS)
        with pytest.raises(error) as caught:
            await client.load(echo_worker.settings(path), lambda *_: None)
        assert str(caught.value) == text
        assert client.lost.result() == text
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (plan(2, uid=echo_worker.UID_RAISES), WorkerLost, "ArithmeticError: the matrix said no"),
        (plan(1), StalePlan, "step 1 after step 1"),
        (plan(2, epoch=EPOCH - 1), StalePlan, "a plan of epoch 6 reached the worker of epoch 7"),
        (plan(2, uid=echo_worker.UID_ANSWERS_ANOTHER_STEP), StalePlan, "was answered by step 3"),
        (plan(2, uid=echo_worker.UID_LOSES_A_COLUMN), WorkerLost, "ValueError: step 2: columns of 1, 2, 2, 2 entries"),
    ],
)
def test_a_step_that_fails_ends_the_link_and_says_why(
    address: str, wrong: StepPlan, error: type[Exception], text: str
) -> None:
    async def act(client: WorkerClient) -> None:
        await execute(client, plan(1))
        with pytest.raises(error, match=text):
            await execute(client, wrong)
        assert text in await client.lost
        with pytest.raises(WorkerLost, match=text):
            await execute(client, plan(3))

    linked(address, act)


def test_a_link_that_is_closed_checks_nothing_and_says_so(address: str) -> None:
    """Before, and under the call: whoever asks is answered, and at once."""

    async def run() -> None:
        client = WorkerClient(address, echo_worker.TERMS)
        await client.load(echo_worker.settings(), lambda *_: None)
        under_way = [asyncio.create_task(client.check_integrity()) for _ in range(8)]
        await asyncio.sleep(0)
        await client.close()
        async with asyncio.timeout(ACT_TIMEOUT_S):
            outcomes = await asyncio.gather(*under_way, return_exceptions=True)
            assert all(isinstance(outcome, WorkerLost) or outcome == ["0 steps"] for outcome in outcomes), outcomes
            for _ in range(2):
                with pytest.raises(WorkerLost, match="closed the link"):
                    await client.check_integrity()

    asyncio.run(run())


def test_a_failed_worker_serves_nobody_again(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        with pytest.raises(WorkerLost):
            await execute(client, plan(1, uid=echo_worker.UID_RAISES))
        another = WorkerClient(address, echo_worker.TERMS)
        with pytest.raises(WorkerLost, match="the worker is unusable: ArithmeticError"):
            await another.check_integrity()
        await another.close()

    linked(address, act)
    assert health(address) == health_pb2.HealthCheckResponse.NOT_SERVING


def test_every_step_in_flight_fails_with_the_first_one(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        outcomes = await asyncio.gather(
            execute(client, plan(1, uid=echo_worker.UID_RAISES)), execute(client, plan(2)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [WorkerLost, LinkBroken]
        assert all("the matrix said no" in str(outcome) for outcome in outcomes)

    linked(address, act)


def test_a_worker_has_one_life_and_one_runtime(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        second = WorkerClient(address, echo_worker.TERMS)
        with pytest.raises(WorkerLost, match="a worker loads once"):
            await second.load(echo_worker.settings(), lambda *_: None)
        await second.close()
        await execute(client, plan(1))

    linked(address, act)


def test_a_link_that_ends_between_steps_is_noticed() -> None:
    server, address = echo_worker.serve(EPOCH)

    async def act(client: WorkerClient) -> None:
        assert not client.lost.done()
        server.stop(None)
        assert address in await asyncio.wait_for(client.lost, 5)

    linked(address, act)


def test_abandoning_a_link_wakes_the_step_in_flight(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        step = asyncio.create_task(execute(client, plan(1, uid=echo_worker.UID_WAITS)))
        await asyncio.to_thread(echo_worker.WAITING.wait)
        client.abandon("the node went away")
        with pytest.raises(WorkerLost, match=r"^the node went away$"):
            await step

    linked(address, act)


def test_health_tells_loaded_from_not(address: str) -> None:
    assert health(address) == health_pb2.HealthCheckResponse.NOT_SERVING

    async def act(client: WorkerClient) -> None:
        assert await asyncio.to_thread(health, address) == health_pb2.HealthCheckResponse.SERVING

    linked(address, act)


def test_a_port_range_is_searched_and_its_end_is_an_error() -> None:
    first = make_server(1)
    port = bind(first, LOOPBACK, 0)
    other = make_server(1)
    with pytest.raises(OSError, match=f"cannot listen on {LOOPBACK}, port {port}"):
        bind(other, LOOPBACK, port)
    assert bind(other, LOOPBACK, range(port, port + 20)) > port
    first.stop(None)
    other.stop(None)


@pytest.mark.parametrize(
    ("host", "address"), [("::1", "[::1]:5"), ("127.0.0.1", "127.0.0.1:5"), ("localhost", "localhost:5")]
)
def test_addresses_bracket_what_has_colons(host: str, address: str) -> None:
    assert join_address(host, 5) == address


def test_a_factory_that_cannot_be_imported_is_a_failed_load() -> None:
    server, address = serve_worker(
        factory_at("no_such_module:load"),
        epoch=EPOCH,
        secret=echo_worker.TERMS.secret,
        bind_host=LOOPBACK,
        advertise_host=None,
        ports=range(1),
    )

    async def act(client: WorkerClient) -> None: ...

    with pytest.raises(WorkerLost, match="ModuleNotFoundError: No module named 'no_such_module'"):
        linked(address, act)
    server.stop(None).wait()


def test_processes_that_are_forked_while_grpc_is_at_work_come_to_life() -> None:
    """Ray forks its daemons so, and may do it again in the middle of the service."""
    path = os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "proto", CHECKOUT / "tests")))
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    command = [sys.executable, "-m", "fakes.forker", "60"]
    environment["PYTHONPATH"] = path
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0"]


def health(address: str) -> int:
    with make_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5, metadata=echo_worker.TERMS.metadata).status
