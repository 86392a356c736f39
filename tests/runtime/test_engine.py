"""The engine end to end on a fake worker: events, verdicts, aborts, policies, losses, and a drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fakes.front_sink import RecordingSink
from fakes.requests import request
from fakes.worker import FakeSource, describe, margin_of, true_stream, true_token

from configs.schema import ClusterSettings, SchedulerSettings, ServeSettings, SpeculationSettings
from runtime.engine import Engine
from runtime.events import ErrorEvent, TokenEvent
from runtime.front.errors import (
    DuplicateRequest,
    InternalError,
    InvalidRequest,
    OutriderError,
    Overloaded,
    StaleRevision,
    Unavailable,
)
from runtime.request import Finish, FinishReason
from runtime.verification.policy import Fixed, Off
from workers.plan import LoadError, StepPlan, StepResult, StepTimeout, WorkerLost

SETTINGS = ServeSettings(
    scheduler=SchedulerSettings(max_step_tokens=32, max_waiting=3),
    speculation=SpeculationSettings(gamma=3, gamma_max=4),
)
LENGTH = Finish(reason=FinishReason.LENGTH)


async def settle_down() -> None:
    """Lets everything run that waits for no step."""
    for _ in range(20):
        await asyncio.sleep(0)


async def no_pause(seconds: float) -> None:
    await asyncio.sleep(0)


class House:
    """An engine between a fake worker and a recording sink."""

    def __init__(self, source: FakeSource, settings: ServeSettings) -> None:
        self.source = source
        self.sink = RecordingSink()
        self.engine = Engine(settings, source, self.sink, pause=no_pause)
        self.states: list[bool] = []
        self.engine.add_state_listener(self.states.append)

    @property
    def num_pages_used(self) -> int:
        return sum(use.used for use in self.engine.statistics().pages)

    async def step(self) -> None:
        """Lets the step in flight answer."""
        await settle_down()
        self.source.worker.let_go()
        await settle_down()


@asynccontextmanager
async def house(*, gated: bool = False, settings: ServeSettings = SETTINGS, **changes: object) -> AsyncIterator[House]:
    """A started house; on leaving, the books balance and no plan broke the contract."""
    built = House(FakeSource(describe(**changes), gated=gated), settings)
    await built.engine.start()
    try:
        yield built
        assert built.engine.check_integrity() == []
    finally:
        await built.engine.stop(drain_s=0)
    assert built.source.violations == []
    assert built.sink.violations == []
    assert built.num_pages_used == 0
    assert built.source.is_stopped


def asynchronous(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs a test on an event loop of its own."""

    def run() -> None:
        asyncio.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@asynchronous
async def test_each_request_gets_its_own_tokens_and_one_end() -> None:
    async with house() as h:
        requests = [request(uid, num_prompt=uid, max_tokens=3 + uid) for uid in range(1, 4)]
        for each in requests:
            h.engine.submit(each)
        await h.sink.wait_for_end(1, 2, 3)
        for each in requests:
            assert tuple(h.sink.tokens[each.uid]) == true_stream(each)
            assert h.sink.end_of(each.uid) == LENGTH
        # All came in before the first round, so they share every batch.
        assert h.engine.statistics().steps < 9


@asynchronous
async def test_usage_and_statistics_count_the_same_things() -> None:
    async with house() as h:
        h.engine.submit(request(1, max_tokens=20, report_rounds=True))
        await h.sink.wait_for_end(1)
        await settle_down()
        usage, statistics = h.sink.usage[1], h.engine.statistics()
        rounds = [the_round for event in h.sink.token_events for the_round in event.rounds]
        assert all(r.margins == tuple(map(margin_of, r.emitted)) for r in rounds)
        assert usage.completion == 20 == usage.accepted + usage.rounds - usage.trimmed
        assert (usage.prompt, usage.seed) == (3, 1)
        assert usage.rounds == len(rounds) == statistics.rounds == statistics.steps
        assert usage.drafted == sum(len(r.drafted) for r in rounds) == statistics.drafted == 3 * (usage.rounds - 1)
        assert usage.admitted == usage.drafted == statistics.admitted
        assert usage.accepted == sum(r.accepted for r in rounds) == statistics.accepted > 0
        by_position = [sum(r.accepted > k for r in rounds) for k in range(4)]
        assert list(statistics.accepted_per_position) == by_position
        assert statistics.drafted_per_position == (usage.rounds - 1,) * 3 + (0,)
        assert statistics.emitted == 20
        assert statistics.timings.total_s == statistics.steps
        assert statistics.timings.target_s == statistics.steps / 2
        assert statistics.host_s > 0
        assert statistics.execute_s > 0


@asynchronous
async def test_the_end_says_what_matched() -> None:
    """A stop token is told apart from the end of sequence, and either from the length; the token itself is kept."""
    async with house() as h:
        by_stop = request(1, max_tokens=20)
        position = next(i for i in range(3, 20) if true_token(by_stop.prompt, i) not in true_stream(by_stop)[:i])
        stop_id = true_token(by_stop.prompt, position)
        uid_of_eos = next(
            uid for uid in range(2, 1000) if 3 < len(true_stream(request(uid, max_tokens=20, eos=True))) < 20
        )
        h.engine.submit(request(1, max_tokens=20, stop_token_ids=(stop_id,)))
        h.engine.submit(request(uid_of_eos, max_tokens=20, eos=True))
        await h.sink.wait_for_end(1, uid_of_eos)
        assert h.sink.end_of(1) == Finish(reason=FinishReason.STOP_TOKEN, stop_token_id=stop_id)
        assert tuple(h.sink.tokens[1]) == true_stream(by_stop)[: position + 1]
        assert h.sink.end_of(uid_of_eos) == Finish(reason=FinishReason.EOS)
        assert h.sink.tokens[uid_of_eos][-1] == 0


@asynchronous
async def test_events_reach_the_front_after_the_next_plan_reached_the_worker() -> None:
    async with house() as h:
        plans_at_delivery: list[tuple[int, int]] = []
        h.sink.on_deliver = lambda events: plans_at_delivery.append((len(h.source.worker.plans), len(events)))
        h.engine.submit(request(1, max_tokens=30))
        await h.sink.wait_for_end(1)
        assert [plans for plans, _ in plans_at_delivery] == list(range(2, len(plans_at_delivery) + 2))


@asynchronous
async def test_a_sequence_with_stop_strings_waits_for_its_verdict_and_others_do_not_lag() -> None:
    async with house() as h:
        h.sink.stop_after[1] = 4
        plans_at_delivery: list[tuple[int, tuple[int, ...]]] = []
        h.sink.on_deliver = lambda events: plans_at_delivery.append(
            (len(h.source.worker.plans), tuple(event.uid for event in events))
        )
        h.engine.submit(request(1, max_tokens=12, stop_strings=("x",)))
        h.engine.submit(request(2, max_tokens=12))
        await h.sink.wait_for_end(1, 2)
        assert plans_at_delivery[:3] == [(1, (1,)), (2, (2,)), (2, (1,))]
        assert h.sink.end_of(1) == "stop string"
        tokens = tuple(h.sink.tokens[1])
        assert 4 <= len(tokens) < 8
        assert tokens == true_stream(request(1, max_tokens=12))[: len(tokens)]
        assert h.sink.end_of(2) == LENGTH


@asynchronous
async def test_the_last_event_of_a_sequence_with_stop_strings_needs_no_verdict() -> None:
    async with house() as h:
        h.engine.submit(request(1, max_tokens=6, stop_strings=("x",)))
        await h.sink.wait_for_end(1)
        *earlier, last = (event.needs_verdict for event in h.sink.token_events)
        assert all(earlier)
        assert not last


@asynchronous
async def test_a_verdict_that_does_not_come_ends_the_request_not_the_engine() -> None:
    async with house() as h:
        h.sink.gives_verdicts = False
        h.engine.submit(request(1, stop_strings=("x",)))
        h.engine.submit(request(2))
        await h.sink.wait_for_end(1, 2)
        assert isinstance(h.sink.end_of(1), InternalError)
        assert h.sink.end_of(2) == LENGTH


@asynchronous
async def test_an_abort_returns_slot_and_pages_at_once_and_nothing_more_is_heard() -> None:
    async with house(gated=True) as h:
        h.engine.submit(request(1, max_tokens=12))
        h.engine.submit(request(2, max_tokens=12))
        await h.step()
        await h.step()
        heard = len(h.sink.tokens[1])
        used = h.num_pages_used
        h.engine.abort(1)
        assert h.num_pages_used == used // 2
        h.engine.abort(1)
        h.engine.abort(77)
        await h.step()
        assert h.source.worker.plans[-1].released_slots != ()
        assert len(h.source.worker.plans[-1].slots) == 1
        assert len(h.sink.tokens[1]) == heard
        assert h.sink.ends[1] == []
        h.engine.submit(request(3, request_id="request-1"))


@asynchronous
async def test_an_abort_drops_tokens_that_are_not_yet_delivered() -> None:
    """The abort comes between the plan that follows those tokens and their delivery."""
    async with house() as h:
        run = h.source.worker.run

        def abort_at_second_plan(plan: StepPlan) -> StepResult:
            if len(h.source.worker.plans) == 1:
                h.engine.abort(1)
            return run(plan)

        h.source.worker.run = abort_at_second_plan  # type: ignore[method-assign]
        h.engine.submit(request(1))
        await settle_down()
        assert len(h.source.worker.plans) >= 2
        assert h.sink.batches == []


@asynchronous
async def test_an_abort_takes_a_waiting_request_out_of_the_queue() -> None:
    async with house(gated=True, num_slots=1) as h:
        h.engine.submit(request(1))
        await settle_down()
        h.engine.submit(request(2))
        h.engine.abort(2)
        assert h.engine.statistics().waiting == 0


@asynchronous
async def test_refusals_are_synchronous_and_leave_nothing() -> None:
    async with house(gated=True, num_slots=1) as h:
        h.engine.submit(request(1))
        with pytest.raises(DuplicateRequest):
            h.engine.submit(request(2, request_id="request-1"))
        with pytest.raises(InvalidRequest):
            h.engine.submit(request(2, num_prompt=50))
        await settle_down()
        for uid in (2, 3, 4):
            h.engine.submit(request(uid))
        with pytest.raises(Overloaded):
            h.engine.submit(request(5))
        assert h.engine.statistics().waiting == 3
        assert h.engine.statistics().running == 1


@asynchronous
async def test_before_the_start_everything_is_unavailable() -> None:
    engine = Engine(SETTINGS, FakeSource(), RecordingSink())
    for act in (
        lambda: engine.submit(request(1)),
        lambda: engine.description,
        lambda: engine.policy,
        engine.statistics,
    ):
        with pytest.raises(Unavailable):
            act()
    assert engine.next_uid() != engine.next_uid()


@asynchronous
async def test_a_step_size_that_does_not_suit_the_worker_fails_the_start_and_leaves_no_worker() -> None:
    source = FakeSource()
    engine = Engine(
        SETTINGS.model_copy(update={"scheduler": SchedulerSettings(max_step_tokens=4)}), source, RecordingSink()
    )
    with pytest.raises(ValueError, match="max_step_tokens is 4"):
        await engine.start()
    assert source.is_stopped


@asynchronous
async def test_a_policy_is_in_force_from_the_step_it_names() -> None:
    async with house(gated=True) as h:
        h.engine.submit(request(1, max_tokens=20))
        await settle_down()
        assert (h.engine.policy.policy, h.engine.policy.revision) == (Fixed(3), 1)
        state = await h.engine.set_policy(Off(), expected_revision=1)
        assert (state.policy, state.revision) == (Off(), 2)
        for _ in range(3):
            await h.step()
        gammas = {plan.step_id: (plan.gamma, plan.feed_drafter) for plan in h.source.worker.plans}
        assert gammas[state.effective_step - 1] == (3, True)
        assert gammas[state.effective_step] == (0, False)
        with pytest.raises(StaleRevision):
            await h.engine.set_policy(Fixed(1), expected_revision=1)
        with pytest.raises(InvalidRequest, match=r"5 is not within 0\.\.4"):
            await h.engine.set_policy(Fixed(5))
        assert h.engine.policy == state
        assert (await h.engine.set_policy(Fixed(4))).revision == 3


@asynchronous
async def test_a_checkpoint_without_a_drafter_is_served_plainly() -> None:
    async with house(gamma_max=0, cache_groups=("target",), num_pages=(12,)) as h:
        assert h.engine.policy.policy == Off()
        h.engine.submit(request(1))
        await h.sink.wait_for_end(1)
        assert h.sink.usage[1].drafted == 0


@pytest.mark.parametrize("error", [WorkerLost("killed by signal 9"), StepTimeout("no answer in 30 s")])
def test_a_lost_worker_ends_running_streams_keeps_waiting_ones_and_comes_back(error: WorkerLost | StepTimeout) -> None:
    async def scenario() -> None:
        async with house(gated=True, num_slots=1) as h:
            h.engine.submit(request(1))
            await h.step()
            h.engine.submit(request(2))
            h.source.hold_restarts = True
            h.source.worker.lose(error)
            await settle_down()
            end = h.sink.end_of(1)
            assert isinstance(end, Unavailable)
            assert str(error) in str(end)
            assert type(error).__name__ in str(end)
            assert not h.engine.is_serving
            with pytest.raises(Unavailable):
                h.engine.submit(request(3))
            assert h.sink.ends[2] == []
            h.source.release_restarts.set()
            await settle_down()
            assert h.engine.is_serving
            h.source.worker.gated = False
            h.source.worker.let_go()
            await h.sink.wait_for_end(2)
            assert tuple(h.sink.tokens[2]) == true_stream(request(2))
            first, second = (worker.plans for worker in h.source.workers)
            assert [plan.epoch for plan in (first[-1], second[0])] == [1, 2]
            assert second[0].step_id > first[-1].step_id
            assert second[0].epochs > first[-1].epochs
            assert second[0].released_slots == ()
            assert h.engine.statistics().restarts == 1
            assert h.states == [True, False, True]

    asyncio.run(scenario())


@asynchronous
async def test_a_worker_lost_while_idle_is_replaced_without_a_request() -> None:
    async with house() as h:
        await settle_down()
        h.source.worker.lose(WorkerLost("out of memory"))
        await settle_down()
        assert h.engine.is_serving
        assert "out of memory" in h.source.reasons[0]
        h.engine.submit(request(1))
        await h.sink.wait_for_end(1)
        assert h.sink.end_of(1) == LENGTH


@asynchronous
async def test_a_restart_that_fails_is_tried_again() -> None:
    async with house() as h:
        h.source.failures = [LoadError("no room"), OSError("no port"), None]
        h.source.worker.lose(WorkerLost("gone"))
        await settle_down()
        assert len(h.source.reasons) == 3
        assert h.states == [True, False, True]


@asynchronous
async def test_waiting_requests_do_not_wait_longer_than_a_start_may_take() -> None:
    impatient = SETTINGS.model_copy(update={"cluster": ClusterSettings(start_timeout_s=0.01)})
    async with house(gated=True, num_slots=1, settings=impatient) as h:
        h.engine.submit(request(1))
        await settle_down()
        h.engine.submit(request(2))
        h.source.hold_restarts = True
        h.source.worker.lose(WorkerLost("gone"))
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
        h.source.worker.lose(WorkerLost("gone"))
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
        h.source.worker.lose(WorkerLost("gone"))
        await settle_down()
        assert isinstance(h.sink.end_of(2), InvalidRequest)
        h.source.worker.gated = False
        h.source.worker.let_go()
        await h.sink.wait_for_end(3)
        assert h.sink.end_of(3) == LENGTH


@asynchronous
async def test_an_answer_that_does_not_add_up_ends_that_request_alone() -> None:
    async with house() as h:
        h.source.worker.corrupt_uids.add(1)
        h.engine.submit(request(1))
        h.engine.submit(request(2))
        await h.sink.wait_for_end(1, 2)
        assert isinstance(h.sink.end_of(1), InternalError)
        assert h.sink.end_of(2) == LENGTH
        assert h.engine.statistics().restarts == 0


@asynchronous
async def test_an_unforeseen_failure_ends_everything_loudly_and_the_engine_serves_on() -> None:
    async with house(gated=True, num_slots=1) as h:
        h.engine.submit(request(1))
        await h.step()
        h.engine.submit(request(2))
        h.source.worker.fail_step(RuntimeError("boom"))
        await settle_down()
        for uid in (1, 2):
            assert isinstance(h.sink.end_of(uid), InternalError)
            assert "boom" in str(h.sink.end_of(uid))
        assert h.engine.is_serving
        h.source.worker.gated = False
        h.engine.submit(request(3))
        await h.sink.wait_for_end(3)
        assert h.sink.end_of(3) == LENGTH


@asynchronous
async def test_a_front_that_fails_loses_the_requests_of_that_batch_only() -> None:
    async with house() as h:

        def fail_on_first(events: list[TokenEvent | ErrorEvent]) -> None:
            if any(event.uid == 1 and isinstance(event, TokenEvent) for event in events):
                raise RuntimeError("the front broke")

        h.sink.on_deliver = fail_on_first
        h.engine.submit(request(1))
        await h.sink.wait_for_end(1)
        assert isinstance(h.sink.end_of(1), InternalError)
        h.engine.submit(request(2))
        await h.sink.wait_for_end(2)
        assert h.sink.end_of(2) == LENGTH
        assert h.engine.statistics().restarts == 0


@asynchronous
async def test_a_drain_finishes_what_is_live_and_takes_nothing_new() -> None:
    async with house(num_slots=1) as h:
        h.engine.submit(request(1))
        h.engine.submit(request(2))
        stopping = asyncio.create_task(h.engine.stop(drain_s=60))
        await asyncio.sleep(0)
        assert not h.engine.is_serving
        with pytest.raises(Unavailable):
            h.engine.submit(request(3))
        await stopping
        assert [h.sink.end_of(uid) for uid in (1, 2)] == [LENGTH, LENGTH]


@asynchronous
async def test_a_stop_without_patience_ends_live_requests_as_unavailable() -> None:
    async with house(gated=True, num_slots=1) as h:
        h.engine.submit(request(1))
        h.engine.submit(request(2))
        await settle_down()
        await h.engine.stop(drain_s=0)
        ends = [h.sink.end_of(uid) for uid in (1, 2)]
        assert all(isinstance(end, Unavailable) and isinstance(end, OutriderError) for end in ends)


@asynchronous
async def test_a_stop_during_a_recovery_does_not_wait_for_the_worker() -> None:
    async with house() as h:
        h.source.hold_restarts = True
        h.source.worker.lose(WorkerLost("gone"))
        await settle_down()
        await h.engine.stop(drain_s=0)
        assert h.states == [True, False]


@asynchronous
async def test_a_worker_that_comes_back_during_a_drain_serves_what_waits_and_nothing_new() -> None:
    async with house(gated=True, num_slots=1) as h:
        h.engine.submit(request(1))
        await settle_down()
        h.engine.submit(request(2))
        h.source.hold_restarts = True
        h.source.worker.lose(WorkerLost("gone"))
        await settle_down()
        stopping = asyncio.create_task(h.engine.stop(drain_s=60))
        await settle_down()
        h.source.release_restarts.set()
        await settle_down()
        h.source.worker.gated = False
        h.source.worker.let_go()
        await stopping
        assert h.sink.end_of(2) == LENGTH
        assert h.states == [True, False]
