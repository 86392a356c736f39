"""The link between runtime and rank: order, errors and ends, with the service in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from fakes import echo_worker
from grpc_health.v1 import health_pb2, health_pb2_grpc

from workers.address import join_address
from workers.channel import LOOPBACK, bind, make_channel, make_server
from workers.client import WorkerClient
from workers.main import factory_at
from workers.plan import LoadError, StalePlan, StepPlan, StepTimeout, WorkerLost
from workers.server import SERVICE_NAME, serve_worker

EPOCH = 7
ACT_TIMEOUT_S = 10
"""Nothing here takes a second; what waits for ever fails by then, and its step timeouts are far below or above."""


@pytest.fixture
def address() -> Iterator[str]:
    echo_worker.GATE.clear()
    echo_worker.WAITING.clear()
    server, address = serve_worker(
        echo_worker.load, epoch=EPOCH, bind_host=LOOPBACK, advertise_host=None, ports=range(1)
    )
    yield address
    echo_worker.GATE.set()  # a step that waits would keep the server from ending
    server.stop(None).wait()


def plan(step_id: int, *, uid: int | None = None, epoch: int = EPOCH) -> StepPlan:
    return echo_worker.plan(step_id, epoch, uid)


def linked(address: str, act: Callable[[WorkerClient], Awaitable[None]], *, step_timeout_s: float = 20) -> None:
    """Runs `act` on a loaded link."""

    async def run() -> None:
        client = WorkerClient(address, step_timeout_s=step_timeout_s)
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
        client = WorkerClient(address, step_timeout_s=20)
        description = await client.load(echo_worker.settings(), lambda *frame: seen.append(frame))
        await client.close()
        assert description == echo_worker.EchoWorker.description

    asyncio.run(run())
    assert seen == [("config", 2, 2), ("weights", 2, 2), ("pools", 2, 2)]


def test_steps_come_back_in_order_though_several_are_in_flight(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        results = await asyncio.gather(*(client.execute(plan(t)) for t in range(1, 9)))
        assert [result.step_id for result in results] == list(range(1, 9))
        assert [result.emitted[1][:3] for result in results] == [(5, 9, t) for t in range(1, 9)]
        assert results[3].drafted == ((4, 5, 6), ())
        assert results[0].timings.commit_s == 0.125
        assert await client.check_integrity() == ["8 steps"]

    linked(address, act)


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [("badly", LoadError, echo_worker.LOAD_ERROR), ("crash", WorkerLost, "RuntimeError: the library threw")],
)
def test_the_text_of_a_failed_load_arrives_whole(address: str, path: str, error: type[Exception], text: str) -> None:
    async def run() -> None:
        client = WorkerClient(address, step_timeout_s=20)
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
        await client.execute(plan(1))
        with pytest.raises(error, match=text):
            await client.execute(wrong)
        assert text in await client.lost
        with pytest.raises(WorkerLost, match=text):
            await client.execute(plan(3))

    linked(address, act)


def test_a_failed_worker_serves_nobody_again(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        with pytest.raises(WorkerLost):
            await client.execute(plan(1, uid=echo_worker.UID_RAISES))
        with pytest.raises(WorkerLost, match="the worker is unusable: ArithmeticError"):
            await client.check_integrity()

    linked(address, act)
    assert health(address) == health_pb2.HealthCheckResponse.NOT_SERVING


def test_every_step_in_flight_fails_with_the_first_one(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        outcomes = await asyncio.gather(
            client.execute(plan(1, uid=echo_worker.UID_RAISES)), client.execute(plan(2)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [WorkerLost, WorkerLost]
        assert all("the matrix said no" in str(outcome) for outcome in outcomes)

    linked(address, act)


def test_a_worker_has_one_life_and_one_runtime(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        second = WorkerClient(address, step_timeout_s=20)
        with pytest.raises(WorkerLost, match="a worker loads once"):
            await second.load(echo_worker.settings(), lambda *_: None)
        await second.close()
        await client.execute(plan(1))

    linked(address, act)


def test_a_link_that_ends_between_steps_is_noticed() -> None:
    server, address = serve_worker(
        echo_worker.load, epoch=EPOCH, bind_host=LOOPBACK, advertise_host=None, ports=range(1)
    )

    async def act(client: WorkerClient) -> None:
        assert not client.lost.done()
        server.stop(None)
        assert address in await asyncio.wait_for(client.lost, 5)

    linked(address, act)


def test_a_step_without_a_result_times_out_at_its_deadline(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        begin = asyncio.get_running_loop().time()
        with pytest.raises(StepTimeout, match=r"step 4 has no result after 0\.3 s"):
            await client.execute(plan(4, uid=echo_worker.UID_WAITS))
        assert 0.3 <= asyncio.get_running_loop().time() - begin < 2

    linked(address, act, step_timeout_s=0.3)


def test_a_result_that_waits_for_a_blocked_runtime_is_in_time(address: str) -> None:
    """The worker answers at once; the loop stands still past the deadline and must not blame the worker."""

    async def act(client: WorkerClient) -> None:
        step = asyncio.create_task(client.execute(plan(4, uid=echo_worker.UID_WAITS)))
        await asyncio.to_thread(echo_worker.WAITING.wait)
        await asyncio.wait([step], timeout=0.1)  # a part of its time
        echo_worker.GATE.set()
        time.sleep(0.6)  # the standstill itself
        assert (await step).step_id == 4
        assert not client.lost.done()

    linked(address, act, step_timeout_s=0.4)


def test_a_standstill_puts_a_deadline_off_and_not_away(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        step = asyncio.create_task(client.execute(plan(4, uid=echo_worker.UID_WAITS)))
        await asyncio.to_thread(echo_worker.WAITING.wait)
        time.sleep(0.6)
        begin = asyncio.get_running_loop().time()
        with pytest.raises(StepTimeout):
            await step
        assert 0.1 < asyncio.get_running_loop().time() - begin < 2
        echo_worker.GATE.set()

    linked(address, act, step_timeout_s=0.3)


def test_abandoning_a_link_wakes_the_step_in_flight(address: str) -> None:
    async def act(client: WorkerClient) -> None:
        step = asyncio.create_task(client.execute(plan(1, uid=echo_worker.UID_WAITS)))
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
        factory_at("no_such_module:load"), epoch=EPOCH, bind_host=LOOPBACK, advertise_host=None, ports=range(1)
    )

    async def act(client: WorkerClient) -> None: ...

    with pytest.raises(WorkerLost, match="ModuleNotFoundError: No module named 'no_such_module'"):
        linked(address, act)
    server.stop(None).wait()


def health(address: str) -> int:
    with make_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status
