"""What the operator's face relies on, asked of the real engine and of the fake that its other tests stand on.

Both go on a step at a time here. The real one plans a step as soon as it may, so it runs what the fake lets wait for
the next step: what is compared holds after steps, or before the loop has had a turn.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from fakes.engine import FakeEngine
from fakes.engine_house import settle_down
from fakes.front import in_loop
from fakes.front_sink import RecordingSink
from fakes.requests import request
from fakes.worker import FakeSource, describe, true_stream

from configs.load import load_settings
from parallel.mesh import Mesh
from runtime.engine import Engine
from runtime.front.engine_link import EngineLink
from runtime.front.errors import AbortedByOperator, InvalidRequest, MissingFeature, StaleRevision, Unavailable
from runtime.in_force import SettingsInForce
from runtime.live import EarlyEnd, RequestState
from runtime.request import Finish, FinishReason
from runtime.status import Aborted, ServerState
from runtime.verification.policy import Dynamic, Fixed, Off, PolicyState
from runtime.verification.view import ProfileState
from workers.plan import WorkerLost

both = pytest.mark.parametrize("kind", ["real", "fake"])
LENGTH = Finish(reason=FinishReason.LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An engine that goes on when told to, and what may befall it.

    rank_violations: what each rank will find in itself. close: begins a stop.
    """

    engine: EngineLink
    sink: RecordingSink
    step: Callable[[], Awaitable[None]]
    lose: Callable[[], Awaitable[None]]
    regain: Callable[[], Awaitable[None]]
    rank_violations: list[list[str]]
    close: Callable[[], None]


@asynccontextmanager
async def held(kind: str, *, dp: int = 1) -> AsyncIterator[Held]:
    """A serving engine of `dp` ranks that emits `true_stream` of each request, at least a token a step."""
    sink = RecordingSink()
    async with real(sink, dp) if kind == "real" else fake(sink, dp) as built:
        yield built
    assert sink.violations == []


@asynccontextmanager
async def real(sink: RecordingSink, dp: int) -> AsyncIterator[Held]:
    source = FakeSource(describe(), dp=dp, gated=True)
    engine = Engine(SettingsInForce(load_settings(None, {})), source, sink)

    async def step() -> None:
        await settle_down()
        if source.group.is_waiting:
            source.group.let_go()
        await settle_down()

    async def lose() -> None:
        source.hold_restarts = True
        source.group.lose(WorkerLost("a rank has ended"))
        await settle_down()

    async def regain() -> None:
        source.release_restarts.set()
        await settle_down()

    await engine.start()
    try:
        yield Held(
            engine=engine,
            sink=sink,
            step=step,
            lose=lose,
            regain=regain,
            rank_violations=source.group.rank_violations,
            close=engine.close_intake,
        )
    finally:
        await engine.stop(0)


@asynccontextmanager
async def fake(sink: RecordingSink, dp: int) -> AsyncIterator[Held]:
    engine = FakeEngine(sink, true_stream, description=describe(), mesh=Mesh(dp=dp, ep=dp))

    async def step() -> None:
        engine.step()

    async def lose() -> None:
        engine.set_serving(False)

    async def regain() -> None:
        engine.set_serving(True)

    yield Held(
        engine=engine,
        sink=sink,
        step=step,
        lose=lose,
        regain=regain,
        rank_violations=engine.rank_violations,
        close=engine.close_intake,
    )


def ids_of(engine: EngineLink, limit: int = 100) -> list[str]:
    return [status.request.request_id for status in engine.live_requests(limit)[0]]


@both
@in_loop
async def test_running_requests_are_listed_by_arrival_and_waiting_ones_by_service(kind: str) -> None:
    async with held(kind) as h:
        for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", 2), ("e", -1)):
            h.engine.submit(request(h.engine.next_uid(), request_id=name, max_tokens=8, priority=priority))
        listed, num_live = h.engine.live_requests(100)
        assert ([status.request.request_id for status in listed], num_live) == (["e", "b", "c", "a", "d"], 5)
        for status in listed:
            assert (status.state, status.dp_rank) == (RequestState.WAITING, None)
            assert status.age_s == status.waited_s >= 0
            assert (status.usage.prompt, status.usage.completion) == (3, 0)
        await h.step()
        # 12 pages hold three requests of 3 + 8 tokens and 5 for drafts.
        assert ids_of(h.engine) == ["b", "c", "e", "a", "d"]
        listed, num_live = h.engine.live_requests(4)
        assert ([status.request.request_id for status in listed], num_live) == (["b", "c", "e", "a"], 5)
        for status in listed[:3]:
            assert (status.state, status.dp_rank) == (RequestState.DECODING, 0)
            assert status.age_s >= status.waited_s >= 0
            assert status.usage == h.sink.usage[status.request.uid]
            assert status.usage.completion >= 1
        assert (listed[3].state, listed[3].dp_rank) == (RequestState.WAITING, None)


@both
@in_loop
async def test_the_status_tells_what_every_rank_holds(kind: str) -> None:
    async with held(kind, dp=2) as h:
        first = h.engine.status()
        assert (first.state, first.outage, first.step, first.epoch) == (ServerState.SERVING, "", 0, 1)
        assert (first.mesh, len(first.places)) == (Mesh(dp=2, ep=2), 2)
        assert [(rank.rank, rank.num_ranks, rank.num_slots) for rank in first.ranks] == [(0, 2, 4), (1, 2, 4)]
        assert first.policy == h.engine.policies.state
        assert first.max_waiting == 1024
        for _ in range(7):
            h.engine.submit(request(h.engine.next_uid(), max_tokens=8))
        assert (h.engine.status().statistics.running, h.engine.status().statistics.waiting) == (0, 7)
        await h.step()
        status = h.engine.status()
        statistics = status.statistics
        assert status.step >= 1
        assert status.uptime_s >= first.uptime_s
        assert ([use.running for use in statistics.dp_ranks], statistics.waiting) == ([3, 3], 1)
        for use in statistics.dp_ranks:
            assert (use.slots_used, use.slots_free) == (3, 1)
            assert [(pool.group, pool.used, pool.free) for pool in use.pages] == [("target", 12, 0), ("drafter", 12, 0)]
        assert {status.dp_rank for status in h.engine.live_requests(6)[0]} == {0, 1}
        assert (statistics.steps, statistics.rounds, statistics.requests.submitted) == (1, 6, 7)
        assert statistics.requests.prompt_tokens == 18
        assert statistics.emitted == sum(map(len, h.sink.tokens.values()))
        assert len(statistics.drafted_per_position) == h.engine.description.gamma_max
        assert statistics.timings.total_s > 0
        assert statistics.check_integrity() == []
        policy = await h.engine.policies.set(Off(), None)
        assert h.engine.status().policy == policy


@both
@in_loop
async def test_every_end_is_counted_once(kind: str) -> None:
    async with held(kind) as h:
        names = ("finishes", "aborted", "failed", "stops")
        uids = {name: h.engine.next_uid() for name in names}
        for name, uid in uids.items():
            stops = ("x",) if name == "stops" else ()
            max_tokens = 1 if name == "finishes" else 4
            h.engine.submit(request(uid, num_prompt=1, request_id=name, max_tokens=max_tokens, stop_strings=stops))
        h.sink.stop_after[uids["stops"]] = 1
        h.engine.abort_by_id(["aborted"])
        h.close()
        with pytest.raises(Unavailable):
            h.engine.submit(request(h.engine.next_uid()))
        await h.step()
        await h.lose()
        counted = h.engine.status().statistics.requests
        assert (counted.submitted, sum(counted.refused.values()), counted.refused["Unavailable"]) == (4, 1, 1)
        ended = {**counted.ended}
        assert ended.pop(EarlyEnd.ABORTED) == 1
        assert ended.pop(EarlyEnd.FAILED) == 1
        assert ended == {FinishReason.LENGTH: 1, FinishReason.STOP_STRING: 1}
        assert h.engine.live_requests(10) == ([], 0)


@both
@in_loop
async def test_a_drain_refuses_new_requests_and_lets_live_ones_end(kind: str) -> None:
    async with held(kind) as h:
        heard: list[bool] = []
        h.engine.add_state_listener(heard.append)
        uids = [h.engine.next_uid() for _ in range(4)]
        for uid in uids:
            h.engine.submit(request(uid, max_tokens=8))
        await h.step()
        for _ in range(2):
            h.engine.drain()
            assert (h.engine.status().state, h.engine.is_serving) == (ServerState.DRAINING, False)
        with pytest.raises(Unavailable, match="draining"):
            h.engine.submit(request(h.engine.next_uid()))
        while h.engine.live_requests(1)[1]:
            await h.step()
        assert [h.sink.end_of(uid) for uid in uids] == [LENGTH] * 4
        for _ in range(2):
            h.engine.resume()
            assert (h.engine.status().state, h.engine.is_serving) == (ServerState.SERVING, True)
        assert heard == [False, True]
        late = h.engine.next_uid()
        h.engine.submit(request(late, max_tokens=1))
        while h.engine.live_requests(1)[1]:
            await h.step()
        assert h.sink.end_of(late) == LENGTH


@both
@in_loop
async def test_a_drain_outlasts_the_loss_of_a_rank_and_a_stop_outlasts_a_drain(kind: str) -> None:
    async with held(kind) as h:
        h.engine.submit(request(h.engine.next_uid()))
        await h.step()
        await h.lose()
        assert (h.engine.status().state, h.engine.is_serving) == (ServerState.RECOVERING, False)
        assert "a rank has ended" in h.engine.status().outage
        assert h.engine.status().places == ()
        assert len(h.engine.status().ranks) == 1
        with pytest.raises(Unavailable, match=r"recovering \(.*a rank has ended"):
            h.engine.submit(request(h.engine.next_uid()))
        h.engine.drain()
        await h.regain()
        status = h.engine.status()
        assert (status.state, status.outage, status.epoch) == (ServerState.DRAINING, "", 2)
        assert status.statistics.restarts == 1
        assert len(status.places) == 1
        h.close()
        with pytest.raises(Unavailable, match="stopping"):
            h.engine.resume()
        assert (h.engine.status().state, h.engine.is_serving) == (ServerState.STOPPING, False)


@both
@in_loop
async def test_requests_are_aborted_by_name_and_told_so_after_their_tokens(kind: str) -> None:
    async with held(kind) as h:
        uids = {name: h.engine.next_uid() for name in ("runs", "stays", "ends", "waits")}
        # Of 12 pages 4, 4 and 3 are taken.
        for (name, uid), max_tokens in zip(uids.items(), (8, 8, 1, 12), strict=True):
            h.engine.submit(request(uid, request_id=name, max_tokens=max_tokens))
        await h.step()
        aborted = h.engine.abort_by_id(["waits", "ends", "runs", "never", "waits", "never"])
        assert aborted == Aborted(aborted=("waits", "runs"), unknown=("ends", "never"))
        await settle_down()
        for name in ("runs", "waits"):
            error = h.sink.end_of(uids[name])
            assert isinstance(error, AbortedByOperator)
            assert "operator" in str(error)
        assert h.sink.tokens[uids["runs"]]
        assert not h.sink.tokens[uids["waits"]]
        assert h.sink.end_of(uids["ends"]) == LENGTH
        assert ids_of(h.engine) == ["stays"]
        assert h.engine.abort_by_id(["runs"]) == Aborted(aborted=(), unknown=("runs",))
        again = h.engine.next_uid()
        h.engine.submit(request(again, request_id="runs", max_tokens=1))
        while h.engine.live_requests(1)[1]:
            await h.step()
        assert (h.sink.end_of(again), h.sink.end_of(uids["stays"])) == (LENGTH, LENGTH)
        assert (await h.engine.check_integrity()).violations == ()


@both
@in_loop
async def test_every_rank_checks_itself_and_is_named_with_what_it_finds(kind: str) -> None:
    async with held(kind, dp=2) as h:
        h.engine.submit(request(h.engine.next_uid()))
        await h.step()
        sound = await asyncio.wait_for(h.engine.check_integrity(), 5)
        assert (sound.violations, sound.ranks_checked) == ((), 2)
        h.rank_violations[1] += ["page 3 is held twice", "slot 2 is lost"]
        found = await h.engine.check_integrity()
        assert found.violations == ("rank 1: page 3 is held twice", "rank 1: slot 2 is lost")
        assert found.ranks_checked == 2
        await h.lose()
        with pytest.raises(Unavailable, match="a rank has ended"):
            await h.engine.check_integrity()
        h.rank_violations[1].clear()


@both
@in_loop
async def test_a_change_of_policy_says_who_made_it_and_every_listener_hears_of_it(kind: str) -> None:
    async with held(kind) as h:
        began, first = time.time(), h.engine.policies.state
        assert "settings" in first.set_by
        assert (first.revision, first.num_changes, first.classes) == (1, 0, ())
        heard: tuple[list[PolicyState], list[PolicyState]] = ([], [])
        leave, _ = (h.engine.policies.add_listener(one.append) for one in heard)
        state = await h.engine.policies.set(Off(), 1, set_by="ipv4:10.0.0.7:1")
        assert (state.policy, state.revision, state.set_by, state.num_changes) == (Off(), 2, "ipv4:10.0.0.7:1", 1)
        assert began <= state.set_at <= time.time()
        assert h.engine.policies.state == state == h.engine.status().policy
        leave()
        later = await h.engine.policies.set(Fixed(2), None, set_by="b")
        assert heard == ([state], [state, later])


@both
@in_loop
async def test_a_priority_has_a_policy_of_its_own_until_it_is_removed(kind: str) -> None:
    async with held(kind) as h:
        default = h.engine.policies.state.policy
        await h.engine.policies.set(Off(), None, priority=3)
        state = await h.engine.policies.set(Fixed(1), 2, priority=-1)
        assert (state.policy, state.classes, state.revision) == (default, ((-1, Fixed(1)), (3, Off())), 3)
        state = await h.engine.policies.set(None, None, priority=3)
        assert (state.classes, h.engine.policies.state) == (((-1, Fixed(1)),), state)
        for policy, priority, field in ((None, 3, "priority"), (None, None, "policy"), (Fixed(5), 1, "policy.fixed")):
            with pytest.raises(InvalidRequest, match=f"^{field}"):
                await h.engine.policies.set(policy, None, priority=priority)
        with pytest.raises(StaleRevision):
            await h.engine.policies.set(Off(), 3, priority=9)
        assert h.engine.policies.state == state


@both
@in_loop
async def test_without_a_profile_nothing_is_planned_by_one_and_the_refusals_say_why(kind: str) -> None:
    async with held(kind) as h:
        profile = h.engine.status().speculation.profile
        assert profile.state is ProfileState.MISSING
        assert profile.detail
        words = re.escape(profile.detail)
        for priority in (None, 2):
            with pytest.raises(MissingFeature, match=words):
                await h.engine.policies.set(Dynamic(), None, priority=priority)
        for shadow in (Dynamic(), Fixed(1)):
            with pytest.raises(MissingFeature, match=words):
                h.engine.policies.set_shadow(shadow)
        with pytest.raises(MissingFeature, match=words):
            h.engine.policies.advise()
        with pytest.raises(InvalidRequest, match=r"policy\.fixed\.gamma"):
            h.engine.policies.set_shadow(Fixed(5))
        assert h.engine.policies.set_shadow(None) is None, "there was none"
        status = h.engine.status()
        assert (status.speculation.shadow, status.speculation.fallback, status.policy.revision) == (None, "", 1)
