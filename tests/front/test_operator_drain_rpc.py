"""Drain, resume and abort over real gRPC: what streams, health watches and new requests see of them."""

from __future__ import annotations

import asyncio
import logging

import grpc
import grpc.aio
import pytest
from fakes.front import Front, in_loop, request_for, serving, status_of
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import inference_pb2, operator_pb2, types_pb2
from runtime.front.health import INFERENCE, OPERATOR
from runtime.front.inference_service import TOKENS_SENT_KEY

Code = grpc.StatusCode
Health = health_pb2.HealthCheckResponse
State = operator_pb2.ServerState


async def health_of(front: Front, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(front.client.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


def watch(front: Front, service: str) -> grpc.aio.UnaryStreamCall:
    return health_pb2_grpc.HealthStub(front.client.channel).Watch(health_pb2.HealthCheckRequest(service=service))


async def submit(front: Front, request_id: str, **fields: object) -> grpc.aio.UnaryStreamCall:
    """A call whose request is live."""
    known = len(front.engine.submitted)
    call = front.client.call(request_for(request_id=request_id, **fields))
    await front.engine.until(lambda: len(front.engine.submitted) == known + 1)
    return call


async def frame_of(call: grpc.aio.UnaryStreamCall) -> inference_pb2.GenerateResponse:
    frame = await call.read()
    assert isinstance(frame, inference_pb2.GenerateResponse)
    return frame


@in_loop
async def test_a_drain_lets_live_requests_end_and_refuses_new_ones() -> None:
    async with serving(steps_by_itself=False) as front:
        running = await submit(front, "runs", max_tokens=6)
        front.engine.step()
        await frame_of(running)
        waiting = await submit(front, "waits", max_tokens=3)
        for _ in range(2):
            reply = await front.client.drain()
            assert (reply.state, reply.running, reply.waiting) == (State.SERVER_STATE_DRAINING, 1, 1)
        call = front.client.call(request_for(max_tokens=1))
        assert await status_of(call) == (Code.UNAVAILABLE, "the server is draining; try again later")
        assert dict(await call.trailing_metadata())[TOKENS_SENT_KEY] == "0"
        front.engine.step()
        for ending in (running, waiting):
            assert (await frame_of(ending)).finish.reason == types_pb2.FINISH_REASON_LENGTH
            assert await ending.code() is Code.OK
        status = await front.client.get_status()
        assert status.state == State.SERVER_STATE_DRAINING
        assert (status.counters.finished, status.counters.refused) == (2, 1)
        for _ in range(2):
            assert (await front.client.resume()).state == State.SERVER_STATE_SERVING
        again = await submit(front, "again", max_tokens=3)
        front.engine.step()
        assert (await frame_of(again)).finish.reason == types_pb2.FINISH_REASON_LENGTH


@in_loop
async def test_health_watches_follow_a_drain_and_its_end() -> None:
    async with serving(steps_by_itself=False) as front:
        running = await submit(front, "runs", max_tokens=3)
        watches = {service: watch(front, service) for service in ("", INFERENCE, OPERATOR)}
        for watching in watches.values():
            assert (await watching.read()).status == Health.SERVING
        await front.client.drain()
        assert (await watches[INFERENCE].read()).status == Health.NOT_SERVING
        assert [await health_of(front, service) for service in watches] == [
            Health.SERVING,
            Health.NOT_SERVING,
            Health.SERVING,
        ]
        await front.client.resume()
        assert (await watches[INFERENCE].read()).status == Health.SERVING
        stopping = asyncio.create_task(front.server.stop(15))
        assert (await watches[INFERENCE].read()).status == Health.NOT_SERVING
        assert await health_of(front, OPERATOR) == Health.SERVING, "operators may call while streams end"
        front.engine.step()
        assert (await frame_of(running)).finish.reason == types_pb2.FINISH_REASON_LENGTH
        # Nothing of the above was a change of its own health.
        assert (await watches[OPERATOR].read()).status == Health.NOT_SERVING
        await stopping


@in_loop
async def test_a_drain_does_not_end_with_the_return_of_the_ranks() -> None:
    async with serving() as front:
        await front.client.drain()
        front.engine.set_serving(False)
        front.engine.set_serving(True)
        assert await health_of(front, INFERENCE) == Health.NOT_SERVING
        assert (await front.client.get_status()).state == State.SERVER_STATE_DRAINING
        front.engine.set_serving(False)
        assert (await front.client.resume()).state == State.SERVER_STATE_RECOVERING
        assert await health_of(front, INFERENCE) == Health.NOT_SERVING
        front.engine.set_serving(True)
        assert await health_of(front, INFERENCE) == Health.SERVING


@in_loop
async def test_a_server_that_stops_while_drained_ends_its_streams_and_is_not_resumed() -> None:
    async with serving(steps_by_itself=False) as front:
        running = await submit(front, "runs", max_tokens=3)
        await front.client.drain()
        front.engine.close_intake()
        stopping = asyncio.create_task(front.server.stop(15))
        code, text = await status_of(front.client.resume())
        assert (code, text) == (Code.UNAVAILABLE, "the server is stopping; ask another one")
        assert (await front.client.get_status()).state == State.SERVER_STATE_STOPPING
        assert (await front.client.drain()).state == State.SERVER_STATE_STOPPING
        front.engine.step()
        assert (await frame_of(running)).finish.reason == types_pb2.FINISH_REASON_LENGTH
        await stopping


@in_loop
async def test_aborted_streams_end_with_aborted_after_what_was_committed() -> None:
    async with serving(steps_by_itself=False) as front:
        running = await submit(front, "runs", max_tokens=60)
        whole = await submit(front, "whole", max_tokens=60, stream=False)
        stays = await submit(front, "stays", max_tokens=6)
        front.engine.step()
        assert len((await frame_of(running)).token_ids) == 3
        front.engine.step()
        assert sum([len(frame.token_ids) async for frame in stays]) == 6
        waiting = await submit(front, "waits", max_tokens=60)
        reply = await front.client.abort(["waits", "never", "stays", "runs", "whole", "waits", "never"])
        assert (list(reply.aborted), list(reply.unknown)) == (["waits", "runs", "whole"], ["never", "stays"])
        assert len((await frame_of(running)).token_ids) == 3, "what the second step brought"
        for call, num_sent in ((running, "6"), (whole, "0"), (waiting, "0")):
            assert (await call.code(), await call.details()) == (Code.ABORTED, "an operator has ended the request")
            assert dict(await call.trailing_metadata())[TOKENS_SENT_KEY] == num_sent
        assert not front.engine.live
        assert not front.engine.aborted, "the front has nothing left to abort"
        counters = (await front.client.get_status()).counters
        assert (counters.submitted, counters.finished, counters.aborted) == (4, 1, 3)
        repeated = await front.client.abort(["runs"])
        assert (list(repeated.aborted), list(repeated.unknown)) == ([], ["runs"])


@in_loop
async def test_an_id_is_matched_whole_and_is_free_after_its_abort() -> None:
    async with serving(steps_by_itself=False) as front:
        first = await submit(front, "name", max_tokens=60)
        reply = await front.client.abort(["nam", "name ", "NAME", "names"])
        assert (list(reply.aborted), list(reply.unknown)) == ([], ["nam", "name ", "NAME", "names"])
        await front.client.abort(["name"])
        second = await submit(front, "name", max_tokens=3)
        assert (await status_of(first))[0] is Code.ABORTED
        front.engine.step()
        assert (await frame_of(second)).finish.reason == types_pb2.FINISH_REASON_LENGTH


@in_loop
async def test_the_log_says_who_drained_resumed_and_aborted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "outrider.audit"):
        async with serving(steps_by_itself=False) as front:
            calls = [await submit(front, f"r-{i}", max_tokens=60) for i in range(43)]
            await front.client.drain()
            await front.client.resume()
            await front.client.abort(["r-21", "forged\nline", "r-0"])
            await front.client.abort([f"r-{i}" for i in range(1, 21)])
            await front.client.abort([f"r-{i}" for i in range(22, 43)])
            await front.client.abort(["nobody"])
            for call in calls:
                assert (await status_of(call))[0] is Code.ABORTED
            await front.client.get_status()
            await front.client.list_requests()
    assert len(caplog.messages) == 6
    assert all("127.0.0.1:" in line for line in caplog.messages)
    drained, resumed, aborted, many, more, none = (line.split(" ", 1)[1] for line in caplog.messages)
    assert drained == "drains: new requests are refused, 0 running and 43 waiting ones go on"
    assert resumed == "ended the drain: the server is serving"
    assert aborted == "aborted 2 requests: r-21, r-0"
    assert many == f"aborted 20 requests: {', '.join(f'r-{i}' for i in range(1, 21))}"
    assert more == f"aborted 21 requests: {', '.join(f'r-{i}' for i in range(22, 42))} and 1 more"
    assert none == "aborted 0 requests: none is live"
