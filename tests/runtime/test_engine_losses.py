"""The engine end to end on a fake worker that dies, errs or comes back smaller, and what a drain leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fakes.engine_house import LENGTH, SETTINGS, House, asynchronous, house, settle_down
from fakes.front_sink import RecordingSink
from fakes.requests import request
from fakes.worker import FakeSource, describe, true_stream

from configs.schema import ClusterSettings
from runtime.engine import Engine
from runtime.events import ErrorEvent, TokenEvent
from runtime.front.errors import InternalError, InvalidRequest, OutriderError, StaleRevision, Unavailable
from runtime.verification.policy import Fixed, Off
from state.ledger import Ledger, RunningSequence
from workers.plan import LoadError, StepTimeout, WorkerLost


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
async def test_what_was_committed_before_a_loss_reaches_the_client_before_the_error() -> None:
    """The worker answers a step and is gone before the next one, during which the tokens would have been delivered."""
    async with house(gated=True) as h:
        h.engine.submit(request(1))
        await h.step()
        await settle_down()
        delivered = len(h.sink.tokens[1])
        h.source.worker.let_go()
        h.source.worker.lose(WorkerLost("gone"))
        await settle_down()
        assert isinstance(h.sink.end_of(1), Unavailable)
        (tenant,) = h.source.workers[0].tenants.values()
        assert 0 < delivered < len(tenant.emitted)
        assert h.sink.tokens[1] == tenant.emitted
        assert h.sink.usage[1].completion == len(tenant.emitted)


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
async def test_a_worker_that_comes_back_with_shorter_drafts_lowers_the_policy() -> None:
    async with house(gated=True) as h:
        before = h.engine.policy
        assert before.policy == Fixed(3)
        h.source.description = describe(gamma_max=2)
        h.source.worker.lose(WorkerLost("gone"))
        await settle_down()
        lowered = h.engine.policy
        assert (lowered.policy, lowered.revision) == (Fixed(2), before.revision + 1)
        with pytest.raises(StaleRevision):
            await h.engine.set_policy(Fixed(1), expected_revision=before.revision)
        with pytest.raises(InvalidRequest, match=r"3 is not within 0\.\.2"):
            await h.engine.set_policy(Fixed(3))
        h.source.worker.gated = False
        h.engine.submit(request(1))
        await h.sink.wait_for_end(1)
        assert h.sink.end_of(1) == LENGTH
        assert {plan.gamma for plan in h.source.worker.plans if plan.slots} == {2}
        assert h.source.worker.plans[0].step_id == lowered.effective_step


@asynchronous
async def test_a_worker_that_comes_back_without_a_drafter_is_served_plainly() -> None:
    async with house() as h:
        h.source.description = describe(gamma_max=0, cache_groups=("target",), num_pages=(12,))
        h.source.worker.lose(WorkerLost("gone"))
        await settle_down()
        assert h.engine.policy.policy == Off()
        h.engine.submit(request(1))
        await h.sink.wait_for_end(1)
        assert h.sink.end_of(1) == LENGTH


@asynchronous
async def test_a_worker_that_comes_back_with_longer_drafts_may_use_them() -> None:
    async with house(gamma_max=2) as h:
        assert h.engine.policy.policy == Fixed(2)
        h.source.description = describe(gamma_max=4)
        h.source.worker.lose(WorkerLost("gone"))
        await settle_down()
        assert (h.engine.policy.policy, h.engine.policy.revision) == (Fixed(2), 1)
        await h.engine.set_policy(Fixed(4))
        h.engine.submit(request(1))
        await h.sink.wait_for_end(1)
        assert h.sink.end_of(1) == LENGTH
        assert h.engine.statistics().drafted_per_position[3] > 0


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


def the_restart_is_cancelled(h: House, monkeypatch: pytest.MonkeyPatch) -> None:
    h.source.failures = [asyncio.CancelledError("by a part of it")]


def the_pause_between_restarts_raises(h: House, monkeypatch: pytest.MonkeyPatch) -> None:
    h.source.failures = [LoadError("no room")]
    h.pause_error = ArithmeticError("no time")


def the_front_answers_nonsense(h: House, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = h.sink.deliver

    def answer_nonsense(events: list[TokenEvent | ErrorEvent]) -> list[None]:
        deliver(events)
        return [None]

    monkeypatch.setattr(h.sink, "deliver", answer_nonsense)


@pytest.mark.parametrize(
    "breaks", [the_restart_is_cancelled, the_pause_between_restarts_raises, the_front_answers_nonsense]
)
@pytest.mark.parametrize("is_draining", [False, True])
def test_a_recovery_that_fails_itself_ends_everything_loudly(
    breaks: Callable[[House, pytest.MonkeyPatch], None],
    is_draining: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The loop is over then, and nobody waits for it any longer, a drain included."""

    async def scenario() -> None:
        async with house(gated=True, num_slots=1) as h:
            h.engine.submit(request(1))
            await h.step()
            h.engine.submit(request(2))
            breaks(h, monkeypatch)
            stopping = asyncio.create_task(h.engine.stop(drain_s=60)) if is_draining else None
            await settle_down()
            h.source.worker.lose(WorkerLost("gone"))
            await settle_down()
            assert isinstance(h.sink.end_of(1), Unavailable)
            assert isinstance(h.sink.end_of(2), InternalError)
            assert "the engine has ended" in str(h.sink.end_of(2))
            assert not h.engine.is_serving
            assert h.states == [True, False]
            with pytest.raises(Unavailable):
                h.engine.submit(request(3))
            assert [r.levelname for r in caplog.records if "loop has ended" in r.message] == ["CRITICAL"]
            if stopping is not None:
                assert stopping.done()

    asyncio.run(scenario())


def test_books_that_cannot_let_go_keep_no_stream_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two run and one waits; the books fail on the second of the two, in the middle of ending both."""
    close = Ledger.close

    def close_all_but_2(ledger: Ledger, uid: int) -> RunningSequence:
        if uid == 2:
            raise LookupError("slot 2 has no tenant")
        return close(ledger, uid)

    monkeypatch.setattr(Ledger, "close", close_all_but_2)

    async def scenario() -> None:
        source, sink = FakeSource(describe(num_slots=2), gated=True), RecordingSink()
        engine = Engine(SETTINGS, source, sink)
        await engine.start()
        for uid in (1, 2):
            engine.submit(request(uid))
        await settle_down()
        engine.submit(request(3))
        source.worker.lose(WorkerLost("gone"))
        await settle_down()
        assert isinstance(sink.end_of(1), Unavailable)
        for uid in (2, 3):
            assert "slot 2 has no tenant" in str(sink.end_of(uid))
        assert sink.violations == []
        assert not engine.is_serving
        stopping = asyncio.create_task(engine.stop(drain_s=60))
        await settle_down()
        assert stopping.done()
        assert source.is_stopped

    asyncio.run(scenario())


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
