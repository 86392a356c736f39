"""How a group comes back: at what pace, who waits for it and how long, and what it can do less or more than before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from fakes.engine_house import LENGTH, SETTINGS, House, asynchronous, house, settle_down
from fakes.requests import request
from fakes.worker import describe

from configs.schema import ClusterSettings
from runtime.front.errors import InternalError, InvalidRequest, StaleRevision, Unavailable
from runtime.life import YOUNG_LIFE_S
from runtime.scheduler.group import GroupScheduler
from runtime.verification.policy import Fixed, Off, Policy
from workers.plan import LoadError, StepPlan, WorkerLost


class PlanningFault(Exception):
    pass


def break_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(scheduler: GroupScheduler, policy: Policy) -> StepPlan:
        raise PlanningFault("no step can be planned")

    monkeypatch.setattr(GroupScheduler, "plan", fail)


async def send_and_lose(h: House, uids: Iterable[int]) -> None:
    """One request after the other, each of which ends with a life of the group."""
    for uid in uids:
        h.engine.submit(request(uid))
        await h.sink.wait_for_end(uid)
        await settle_down()
        assert h.engine.is_serving


def test_lives_that_complete_no_step_follow_each_other_ever_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them may be an accident, and its successor starts at once."""

    async def scenario() -> None:
        async with house(dp=2) as h:
            with monkeypatch.context() as patch:
                break_planning(patch)
                await send_and_lose(h, range(1, 11))
            assert isinstance(h.sink.end_of(10), InternalError)
            assert h.pauses_s == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
            # A life that completes a step ends the row.
            h.engine.submit(request(20))
            await h.sink.wait_for_end(20)
            h.source.group.lose(WorkerLost("gone"))
            await settle_down()
            assert h.engine.statistics().restarts == 11
            assert len(h.pauses_s) == 9

    asyncio.run(scenario())


def test_a_life_that_was_idle_for_long_was_not_a_young_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with house() as h:
            break_planning(monkeypatch)
            for uid in range(1, 5):
                h.now_s += YOUNG_LIFE_S
                await send_and_lose(h, [uid])
            assert h.pauses_s == []
            await send_and_lose(h, (5, 6))
            assert h.pauses_s == [0.5]

    asyncio.run(scenario())


def test_starts_that_fail_after_young_lives_go_on_from_their_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with house() as h:
            break_planning(monkeypatch)
            await send_and_lose(h, (1, 2, 3))
            h.source.failures = [LoadError("no room"), LoadError("no room"), None]
            await send_and_lose(h, (4,))
            assert h.pauses_s == [0.5, 1.0, 2.0, 4.0, 8.0]
            await send_and_lose(h, (5,))
            assert h.pauses_s[5:] == [4.0], "it is the fifth young life; failed starts are not lives"

    asyncio.run(scenario())


@asynchronous
async def test_a_rank_that_does_not_come_back_is_named_to_those_who_wait_and_those_who_come() -> None:
    impatient = SETTINGS.model_copy(update={"cluster": ClusterSettings(start_timeout_s=0.01)})
    async with house(dp=2, gated=True, num_slots=1, settings=impatient) as h:
        for uid in (1, 2, 3):
            h.engine.submit(request(uid))
        await settle_down()
        why = "rank 1 of 2: model.norm.weight: missing from the checkpoint"
        h.source.failures = [LoadError(why)]
        h.hold_pauses = True
        h.source.group.lose(WorkerLost("rank 0 of 2: killed by signal 9"))
        await h.sink.wait_for_end(3)
        for text in ("rank 0 of 2: killed by signal 9", why):
            assert text in str(h.sink.end_of(3))
            with pytest.raises(Unavailable, match=text):
                h.engine.submit(request(4))
        h.release_pauses.set()
        await settle_down()
        assert h.engine.is_serving


@asynchronous
async def test_waiting_requests_do_not_wait_longer_than_a_start_may_take() -> None:
    impatient = SETTINGS.model_copy(update={"cluster": ClusterSettings(start_timeout_s=0.01)})
    async with house(gated=True, num_slots=1, settings=impatient) as h:
        h.engine.submit(request(1))
        await settle_down()
        h.engine.submit(request(2))
        h.source.hold_restarts = True
        h.source.group.lose(WorkerLost("gone"))
        await h.sink.wait_for_end(1, 2)
        assert isinstance(h.sink.end_of(2), Unavailable)
        h.source.release_restarts.set()
        await settle_down()
        assert h.engine.is_serving


@asynchronous
async def test_once_the_worker_is_back_nobody_loses_patience() -> None:
    impatient = SETTINGS.model_copy(update={"cluster": ClusterSettings(start_timeout_s=0.01)})
    async with house(gated=True, num_slots=1, settings=impatient) as h:
        h.engine.submit(request(1))
        await settle_down()
        h.engine.submit(request(2))
        h.engine.submit(request(3))
        h.source.group.lose(WorkerLost("gone"))
        # Timers fire in order: whatever was to happen after 0.01 s has happened then.
        later = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, later.set)
        await later.wait()
        assert (h.sink.ends[2], h.sink.ends[3]) == ([], [])


@asynchronous
async def test_a_worker_that_comes_back_smaller_refuses_what_it_cannot_hold() -> None:
    async with house(gated=True, num_slots=1) as h:
        h.engine.submit(request(1))
        await settle_down()
        h.engine.submit(request(2, num_prompt=20))
        h.engine.submit(request(3))
        h.source.description = describe(num_pages=(5, 5), num_slots=1)
        h.source.group.lose(WorkerLost("gone"))
        await settle_down()
        assert isinstance(h.sink.end_of(2), InvalidRequest)
        h.source.group.gated = False
        h.source.group.let_go()
        await h.sink.wait_for_end(3)
        assert h.sink.end_of(3) == LENGTH


@asynchronous
async def test_a_worker_that_comes_back_with_shorter_drafts_lowers_the_policy() -> None:
    async with house(gated=True) as h:
        before = h.engine.policies.state
        assert before.policy == Fixed(3)
        h.source.description = describe(gamma_max=2)
        h.source.group.lose(WorkerLost("gone"))
        await settle_down()
        lowered = h.engine.policies.state
        assert (lowered.policy, lowered.revision) == (Fixed(2), before.revision + 1)
        with pytest.raises(StaleRevision):
            await h.engine.policies.set(Fixed(1), expected_revision=before.revision)
        with pytest.raises(InvalidRequest, match=r"3 is not within 0\.\.2"):
            await h.engine.policies.set(Fixed(3))
        h.source.group.gated = False
        h.engine.submit(request(1))
        await h.sink.wait_for_end(1)
        assert h.sink.end_of(1) == LENGTH
        assert {plan.gamma for plan in h.source.group.plans if plan.num_sequences} == {2}
        assert h.source.group.plans[0].step_id == lowered.effective_step


@asynchronous
async def test_a_worker_that_comes_back_without_a_drafter_is_served_plainly() -> None:
    async with house() as h:
        h.source.description = describe(gamma_max=0, cache_groups=("target",), num_pages=(12,))
        h.source.group.lose(WorkerLost("gone"))
        await settle_down()
        assert h.engine.policies.state.policy == Off()
        h.engine.submit(request(1))
        await h.sink.wait_for_end(1)
        assert h.sink.end_of(1) == LENGTH


@asynchronous
async def test_a_worker_that_comes_back_with_longer_drafts_may_use_them() -> None:
    async with house(gamma_max=2) as h:
        assert h.engine.policies.state.policy == Fixed(2)
        h.source.description = describe(gamma_max=4)
        h.source.group.lose(WorkerLost("gone"))
        await settle_down()
        assert (h.engine.policies.state.policy, h.engine.policies.state.revision) == (Fixed(2), 1)
        await h.engine.policies.set(Fixed(4))
        h.engine.submit(request(1))
        await h.sink.wait_for_end(1)
        assert h.sink.end_of(1) == LENGTH
        assert h.engine.statistics().drafted_per_position[3] > 0
