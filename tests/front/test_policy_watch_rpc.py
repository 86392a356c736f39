"""A watch of the policy over real gRPC: what watchers see and miss, how many there may be, and how each ends."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from fakes.front import Front, in_loop, request_for, serving, status_of

from outrider.v1 import operator_pb2
from runtime.front import policy_watch, server
from runtime.front.errors import Unavailable
from runtime.verification.policy import Fixed, Off
from runtime.verification.view import SpeculationView

Code = grpc.StatusCode


async def read(call: grpc.aio.Call) -> operator_pb2.VerificationPolicyState:
    state = await call.read()
    assert isinstance(state, operator_pb2.VerificationPolicyState), "the watch has ended"
    return state


async def end_of(call: grpc.aio.Call) -> tuple[grpc.StatusCode, str]:
    """Code and text that a watch ends with, states before it left aside."""
    try:
        while True:
            await read(call)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""


async def until_watched_by(front: Front, num_watchers: int) -> None:
    """Returns when so many listen: a call that is cancelled ends a few turns later."""
    await front.engine.until(lambda: front.engine.policies.num_listeners == num_watchers)


@in_loop
async def test_a_watch_begins_with_what_is_in_force_and_tells_each_change() -> None:
    async with serving() as front:
        call = front.client.watch_policy()
        assert await read(call) == await front.client.get_policy()
        off = await front.client.set_policy(None)
        assert await read(call) == off
        own = await front.client.switch_policy(off.policy, priority=3)
        assert await read(call) == own
        assert own.classes[0].priority == 3
        front.engine.policies.store.fit(2, effective_step=9, now=0.0)
        gone = await front.client.switch_policy(None, priority=3)
        assert await read(call) == gone, "a worker's new limit changes nothing here"
        call.cancel()


@in_loop
async def test_a_change_of_what_a_policy_comes_to_is_told_too() -> None:
    async with serving() as front:
        call = front.client.watch_policy()
        assert (await read(call)).fallback == ""
        front.engine.policies.view = SpeculationView(
            profile=front.engine.policies.view.profile, fallback="the profile went stale"
        )
        front.engine.policies.store.announce()
        assert (await read(call)).fallback == "the profile went stale"
        call.cancel()


@in_loop
async def test_every_watcher_is_told_and_one_that_leaves_takes_nobody_with_it() -> None:
    async with serving() as front:
        calls = [front.client.watch_policy() for _ in range(5)]
        for call in calls:
            await read(call)
        calls.pop().cancel()
        await until_watched_by(front, 4)
        state = await front.client.set_policy(1)
        for call in calls:
            assert await read(call) == state
            call.cancel()
        await until_watched_by(front, 0)


@in_loop
async def test_changes_in_a_row_are_told_as_one_and_the_newest_is_never_missed() -> None:
    async with serving() as front:
        call = front.client.watch_policy()
        await read(call)
        for gamma in range(1, 9):  # without a turn of the loop between them
            await front.engine.policies.set(Fixed(gamma))
        assert (await read(call)).revision == 9
        await front.engine.policies.set(Off())
        assert (await read(call)).revision == 10, "and nothing in between waits to be told"
        call.cancel()


@in_loop
async def test_a_reader_that_sleeps_holds_up_nobody_and_finds_the_newest_state_last() -> None:
    async with serving() as front:
        sleeper, reader = front.client.watch_policy(), front.client.watch_policy()
        await read(sleeper)
        await read(reader)
        name = "x" * 1_000_000  # a few of them fill what gRPC sends unread
        for number in range(30):
            state = await front.engine.policies.set(Fixed(number % 5), set_by=name)
            assert (await read(reader)).revision == state.revision
        revisions = []
        while not revisions or revisions[-1] != state.revision:
            revisions.append((await read(sleeper)).revision)
        assert revisions == sorted(set(revisions))
        assert len(revisions) < 30, "some were missed"
        sleeper.cancel()
        reader.cancel()


@in_loop
async def test_so_many_may_watch_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert policy_watch.MAX_WATCHERS == 64
    monkeypatch.setattr(policy_watch, "MAX_WATCHERS", 3)
    async with serving() as front:
        calls = [front.client.watch_policy() for _ in range(3)]
        for call in calls:
            await read(call)
        code, text = await status_of(front.client.watch_policy())
        assert code is Code.RESOURCE_EXHAUSTED
        assert text == "3 clients watch the policy already; read it instead, or end a watch"
        calls.pop().cancel()
        await until_watched_by(front, 2)
        late = front.client.watch_policy()
        assert (await read(late)).revision == 1
        for call in (*calls, late):
            call.cancel()


@in_loop
async def test_a_server_that_stops_ends_its_watches_and_says_so() -> None:
    async with serving() as front:
        calls = [front.client.watch_policy() for _ in range(3)]
        for call in calls:
            await read(call)
        stopping = asyncio.create_task(front.server.stop(0))
        for call in calls:
            assert await end_of(call) == (Code.UNAVAILABLE, "this server is stopping; ask another one")
        await stopping
        await until_watched_by(front, 0)


@in_loop
async def test_a_watch_lasts_while_streams_end_and_ends_with_them() -> None:
    async with serving(steps_by_itself=False) as front:
        stream = front.client.call(request_for(max_tokens=3))
        await front.engine.until(lambda: bool(front.engine.live))
        call = front.client.watch_policy()
        await read(call)
        stopping = asyncio.create_task(front.server.stop(10))
        await asyncio.sleep(0)
        state = await front.client.set_policy(2)
        assert await read(call) == state
        front.engine.step()
        assert sum([len(frame.token_ids) async for frame in stream]) == 3
        assert (await end_of(call))[0] is Code.UNAVAILABLE
        await stopping


@in_loop
async def test_where_watches_have_ended_none_begins() -> None:
    async with serving() as front:
        watches = policy_watch.PolicyWatches(front.engine.policies)
        with watches.open() as watch:
            await watches.stop(0)
            with pytest.raises(Unavailable, match="stopping"):
                await watch.next_change()
        with pytest.raises(Unavailable, match="stopping"), watches.open():
            pass
        assert front.engine.policies.num_listeners == 0


@in_loop
async def test_a_stop_does_not_wait_for_a_watcher_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LAST_WORDS_S", 0.05)
    async with serving() as front:
        sleeper, reader = front.client.watch_policy(), front.client.watch_policy()
        await read(sleeper)
        await read(reader)
        for number in range(30):
            await front.engine.policies.set(Fixed(number % 5), set_by="x" * 1_000_000)
            await read(reader)
        reader.cancel()
        await until_watched_by(front, 1)
        async with asyncio.timeout(5):
            await front.server.stop(0)
        sleeper.cancel()
