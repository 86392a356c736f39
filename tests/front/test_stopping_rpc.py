"""The end of a server as its clients see it: what is taken, what is refused, and what becomes of calls half-way in."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fakes.front import Front, in_loop, request_for, serving, status_of

from outrider.v1 import operator_pb2, types_pb2
from runtime.front.calls import STOPPED
from runtime.front.health import INFERENCE, OPERATOR

Code = grpc.StatusCode
State = operator_pb2.ServerState
GRAMMAR = types_pb2.Constraint(regex="[ab]")


async def health_of(front: Front) -> dict[str, bool]:
    return {service: await front.client.check_health(service) == 1 for service in ("", INFERENCE, OPERATOR)}


async def begun_to_prepare(front: Front) -> grpc.aio.UnaryStreamCall:
    """A call whose constraint is being made ready."""
    front.engine.may_prepare.clear()
    call = front.client.call(request_for(max_tokens=3, constraint=GRAMMAR))
    async with asyncio.timeout(10):
        while not front.engine.prepared:
            await asyncio.sleep(0)
    return call


@in_loop
async def test_while_it_withdraws_requests_are_taken_and_health_sends_them_elsewhere() -> None:
    async with serving() as front:
        front.engine.withdraw()
        assert await health_of(front) == {"": True, INFERENCE: False, OPERATOR: True}
        assert (await front.client.get_status()).state == State.SERVER_STATE_WITHDRAWING
        frames = [frame async for frame in front.client.generate(request_for(max_tokens=3))]
        assert frames[-1].finish.reason == types_pb2.FINISH_REASON_LENGTH
        assert (await status_of(front.client.resume()))[0] is Code.UNAVAILABLE, "it ends all the same"
        assert (await front.client.drain()).state == State.SERVER_STATE_DRAINING
        assert await status_of(front.client.call(request_for())) == (
            Code.UNAVAILABLE,
            "the server is draining; try again later",
        )


@in_loop
async def test_a_stall_is_seen_by_operators_and_requests_are_taken_through_it() -> None:
    async with serving(steps_by_itself=False) as front:
        front.engine.stall(True)
        assert await health_of(front) == {"": True, INFERENCE: False, OPERATOR: True}
        assert (await front.client.get_status()).state == State.SERVER_STATE_STALLED
        call = front.client.call(request_for(max_tokens=3))
        await front.engine.until(lambda: bool(front.engine.live))
        front.engine.stall(False)
        front.engine.step()
        assert [frame.finish.reason async for frame in call] == [types_pb2.FINISH_REASON_LENGTH]
        assert (await health_of(front))[INFERENCE]


@in_loop
async def test_a_loop_that_has_ended_for_good_ends_liveness() -> None:
    async with serving() as front:
        front.engine.end()
        assert await health_of(front) == {"": False, INFERENCE: False, OPERATOR: True}
        assert (await status_of(front.client.call(request_for())))[0] is Code.UNAVAILABLE


@in_loop
async def test_a_request_that_was_let_in_before_is_served_though_its_constraint_was_not_ready() -> None:
    async with serving() as front:
        call = await begun_to_prepare(front)
        front.engine.wind_down()
        stopping = asyncio.create_task(front.server.stop(15))
        code, text = await status_of(front.client.call(request_for()))
        assert (code, "stopping" in text) == (Code.UNAVAILABLE, True)
        assert (await front.client.get_status()).state == State.SERVER_STATE_STOPPING, "operators are answered"
        assert await health_of(front) == {"": True, INFERENCE: False, OPERATOR: True}
        front.engine.may_prepare.set()
        assert [frame.finish.reason async for frame in call] == [types_pb2.FINISH_REASON_LENGTH]
        await stopping


@pytest.mark.parametrize("drain_s", [0.0, 0.05])
@in_loop
async def test_one_that_is_not_ready_in_time_is_told_in_our_own_words(drain_s: float) -> None:
    async with serving() as front:
        call = await begun_to_prepare(front)
        front.engine.wind_down()
        stopping = asyncio.create_task(front.server.stop(drain_s))
        assert await status_of(call) == (Code.UNAVAILABLE, STOPPED)
        await stopping
        assert front.engine.submitted == []
        assert front.engine.live.statistics().submitted == 0


@in_loop
async def test_a_stop_with_less_patience_may_come_in_the_middle_of_one_with_more() -> None:
    async with serving(steps_by_itself=False) as front:
        preparing = await begun_to_prepare(front)
        front.engine.may_prepare.set()
        await front.engine.until(lambda: bool(front.engine.live))
        running = front.client.call(request_for(max_tokens=30))
        await front.engine.until(lambda: len(front.engine.live) == 2)
        patient = asyncio.create_task(front.server.stop(1000))
        for _ in range(3):
            await asyncio.sleep(0)
        patient.cancel()
        await asyncio.gather(patient, return_exceptions=True)
        await front.server.stop(0)
        for call in (preparing, running):
            assert await status_of(call) == (Code.UNAVAILABLE, STOPPED)
