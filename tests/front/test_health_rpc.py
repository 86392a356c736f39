"""Health, reflection and the way a server stops."""

from __future__ import annotations

import asyncio
import socket

import grpc
import grpc.aio
import pytest
from fakes.engine import FakeEngine
from fakes.front import TOKENIZER, Front, in_loop, request_for, serving, status_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from configs.load import load_settings
from outrider.v1 import types_pb2
from runtime.front.client import OutriderClient
from runtime.front.defaults import SamplingDefaults
from runtime.front.health import INFERENCE, MAX_UNTOLD, OPERATOR, HealthServicer
from runtime.front.hub import StreamHub
from runtime.front.server import FrontServer
from runtime.in_force import SettingsInForce
from runtime.reload import Reloader

Code = grpc.StatusCode
Status = health_pb2.HealthCheckResponse


async def check(front: Front, service: str) -> int:
    reply = await health_pb2_grpc.HealthStub(front.client.channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


def watch(front: Front, service: str) -> grpc.aio.UnaryStreamCall:
    return health_pb2_grpc.HealthStub(front.client.channel).Watch(health_pb2.HealthCheckRequest(service=service))


@in_loop
async def test_check_tells_liveness_from_readiness() -> None:
    async with serving() as front:
        assert [await check(front, service) for service in ("", INFERENCE, OPERATOR)] == [Status.SERVING] * 3
        front.engine.set_serving(False)
        watching = watch(front, INFERENCE)
        while (await watching.read()).status != Status.NOT_SERVING:
            pass
        assert [await check(front, service) for service in ("", INFERENCE, OPERATOR)] == [
            Status.SERVING,
            Status.NOT_SERVING,
            Status.SERVING,
        ]
        unknown = health_pb2_grpc.HealthStub(front.client.channel).Check(health_pb2.HealthCheckRequest(service="x"))
        assert (await status_of(unknown))[0] is Code.NOT_FOUND


@in_loop
async def test_watch_sends_the_present_state_and_every_change() -> None:
    async with serving() as front:
        watching = watch(front, INFERENCE)
        for is_serving in (False, True, False):
            assert (await watching.read()).status == (Status.NOT_SERVING if is_serving else Status.SERVING)
            front.engine.set_serving(is_serving)
        assert (await watching.read()).status == Status.NOT_SERVING


@in_loop
async def test_changes_that_come_at_once_are_all_told_in_order() -> None:
    async with serving() as front:
        watching = watch(front, INFERENCE)
        assert (await watching.read()).status == Status.SERVING
        for is_serving in (False, True, False, True):
            front.engine.set_serving(is_serving)
        told = [(await watching.read()).status for _ in range(4)]
        assert told == [Status.NOT_SERVING, Status.SERVING] * 2


@in_loop
async def test_a_watcher_that_does_not_read_costs_no_more_than_so_many_changes_and_is_told_the_newest() -> None:
    service = HealthServicer()
    service.tell("x", True)
    with service._watching("x") as untold:
        for number in range(3 * MAX_UNTOLD):
            service.tell("x", number % 2 == 1)
        service.tell("x", False)
        told = [await untold.take() for _ in range(MAX_UNTOLD)]
        assert told[-1] == Status.NOT_SERVING
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await untold.take()
    assert not service._watches, "nothing is kept of a watcher that has left"


@in_loop
async def test_readiness_follows_what_the_engine_goes_through_and_liveness_does_not() -> None:
    async with serving() as front:
        live, ready = watch(front, ""), watch(front, INFERENCE)
        assert [(await one.read()).status for one in (live, ready)] == [Status.SERVING] * 2
        for leave, enter in (
            (lambda: front.engine.stall(True), lambda: front.engine.stall(False)),
            (lambda: front.engine.set_serving(False), lambda: front.engine.set_serving(True)),
            (front.engine.drain, front.engine.resume),
        ):
            leave()
            assert (await ready.read()).status == Status.NOT_SERVING
            enter()
            assert (await ready.read()).status == Status.SERVING
        front.engine.withdraw()
        assert (await ready.read()).status == Status.NOT_SERVING
        assert await check(front, "") == Status.SERVING
        assert len([frame async for frame in front.client.generate(request_for(max_tokens=3))]) == 1, "still taken"
        front.engine.end()
        assert (await live.read()).status == Status.NOT_SERVING, "which was the first change of it"


@in_loop
async def test_both_ports_tell_the_same_before_the_engine_comes_and_after() -> None:
    settings = SettingsInForce(load_settings(None, {"server.port": 0, "operator.port": 0}))
    server = FrontServer(settings, Reloader(settings))
    await server.listen()
    try:
        async with OutriderClient(server.address) as client, OutriderClient(server.operator_address) as operator:
            for one in (client, operator):
                assert [await one.check_health(service) for service in ("", INFERENCE, OPERATOR)] == [
                    Status.SERVING,
                    Status.NOT_SERVING,
                    Status.NOT_SERVING,
                ]
            watching = health_pb2_grpc.HealthStub(operator.channel).Watch(
                health_pb2.HealthCheckRequest(service=INFERENCE)
            )
            assert (await watching.read()).status == Status.NOT_SERVING
            hub = StreamHub(settings)
            engine = FakeEngine(hub, lambda request: (65,))
            await server.open(engine, hub, TOKENIZER, defaults=SamplingDefaults())
            assert (await watching.read()).status == Status.SERVING
            statuses = await health_pb2_grpc.HealthStub(client.channel).List(health_pb2.HealthListRequest())
            assert {name for name in statuses.statuses if name.startswith("outrider")} == {INFERENCE, OPERATOR}
            assert all(one.status == Status.SERVING for one in statuses.statuses.values())
    finally:
        await server.stop(0)


@in_loop
async def test_watch_of_an_unknown_service_says_so_and_stays_open() -> None:
    async with serving() as front:
        watching = watch(front, "no.such.Service")
        assert (await watching.read()).status == Status.SERVICE_UNKNOWN
        front.engine.set_serving(False)
        await check(front, "")
        assert not watching.done()


@in_loop
async def test_the_client_can_wait_until_it_is_ready() -> None:
    async with serving() as front:
        front.engine.set_serving(False)
        waiting = asyncio.create_task(front.client.wait_ready(INFERENCE, 10))
        assert await check(front, "") == Status.SERVING
        assert not waiting.done()
        front.engine.set_serving(True)
        await waiting


@in_loop
async def test_reflection_lists_every_service() -> None:
    async with serving() as front:
        stub = reflection_pb2_grpc.ServerReflectionStub(front.client.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        [reply] = [reply async for reply in call]
        assert {service.name for service in reply.list_services_response.service} == {
            "outrider.v1.InferenceService",
            "outrider.v1.OperatorService",
            "vllm.grpc.engine.VllmEngine",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }


@in_loop
async def test_a_draining_server_finishes_streams_and_refuses_new_ones() -> None:
    async with serving(steps_by_itself=False) as front:
        running, shorter = front.client.call(request_for(max_tokens=6)), front.client.call(request_for(max_tokens=3))
        await front.engine.until(lambda: len(front.engine.live) == 2)
        watching = watch(front, INFERENCE)
        assert (await watching.read()).status == Status.SERVING
        stopping = asyncio.create_task(front.server.stop(15))
        assert (await watching.read()).status == Status.NOT_SERVING
        assert await check(front, "") == Status.SERVING
        code, text = await status_of(front.client.call(request_for()))
        assert (code, "stopping" in text) == (Code.UNAVAILABLE, True)
        front.engine.step()
        assert len([frame async for frame in shorter]) == 1
        front.engine.step()
        frames = [frame async for frame in running]
        assert frames[-1].finish.reason == types_pb2.FINISH_REASON_LENGTH
        assert sum(len(frame.token_ids) for frame in frames) == 6
        await stopping
        assert not front.engine.aborted
        await front.server.stop(0)


@in_loop
async def test_streams_that_outlast_the_drain_end_with_unavailable() -> None:
    async with serving(steps_by_itself=False) as front:
        running = front.client.call(request_for())
        await front.engine.until(lambda: bool(front.engine.live))
        [uid] = front.engine.live
        stopping = asyncio.create_task(front.server.stop(0.05))
        # Our own words: a connection that merely breaks has the same code.
        assert await status_of(running) == (Code.UNAVAILABLE, "this server has stopped; ask another one")
        await stopping
        assert front.engine.aborted == [uid]


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_a_server_on_ipv6_is_reached_by_its_address() -> None:
    @in_loop
    async def scenario() -> None:
        async with serving(settings={"server.host": "::1"}) as front:
            assert front.address.startswith("[::1]:")
            assert await check(front, "") == Status.SERVING

    scenario()


@in_loop
async def test_two_servers_cannot_share_a_port() -> None:
    async with serving() as front:
        settings = SettingsInForce(load_settings(None, {"server.port": int(front.address.rpartition(":")[2])}))
        with pytest.raises(OSError, match="cannot listen"):
            await FrontServer(settings, Reloader(settings)).listen()
