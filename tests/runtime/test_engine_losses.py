"""The engine end to end on fake ranks that die or err, and what a drain leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from fakes.engine_house import LENGTH, SETTINGS, House, asynchronous, house, settle_down
from fakes.front_sink import RecordingSink
from fakes.requests import request
from fakes.worker import FakeSource, describe, true_stream

from runtime.engine import Engine
from runtime.events import ErrorEvent, TokenEvent
from runtime.front.errors import InternalError, OutriderError, Unavailable
from runtime.in_force import SettingsInForce
from state.ledger import Ledger, RunningSequence
from workers.plan import LoadError, StepPlan, StepResult, StepTimeout, WorkerLost


@pytest.mark.parametrize("error", [WorkerLost("killed by signal 9"), StepTimeout("no answer in 30 s")])
def test_a_lost_worker_ends_running_streams_keeps_waiting_ones_and_comes_back(error: WorkerLost | StepTimeout) -> None:
    async def scenario() -> None:
        async with house(gated=True, num_slots=1) as h:
            h.engine.submit(request(1))
            await h.step()
            h.engine.submit(request(2))
            h.source.hold_restarts = True
            h.source.group.lose(error)
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
            h.source.group.gated = False
            h.source.group.let_go()
            await h.sink.wait_for_end(2)
            assert tuple(h.sink.tokens[2]) == true_stream(request(2))
            last, first = h.source.groups[0].plans[-1], h.source.groups[1].plans[0]
            assert (last.epoch, first.epoch) == (1, 2)
            assert first.step_id > last.step_id
            assert first.batches[0].epochs > last.batches[0].epochs
            assert first.batches[0].released_slots == ()
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
        h.source.group.let_go()
        h.source.group.lose(WorkerLost("gone"))
        await settle_down()
        assert isinstance(h.sink.end_of(1), Unavailable)
        (tenant,) = h.source.groups[0].tenants
        assert 0 < delivered < len(tenant.emitted)
        assert h.sink.tokens[1] == tenant.emitted
        assert h.sink.usage[1].completion == len(tenant.emitted)


@asynchronous
async def test_a_worker_lost_while_idle_is_replaced_without_a_request() -> None:
    async with house() as h:
        await settle_down()
        h.source.group.lose(WorkerLost("out of memory"))
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
        h.source.group.lose(WorkerLost("gone"))
        await settle_down()
        assert len(h.source.reasons) == 3
        assert h.states == [True, False, True]


@asynchronous
async def test_one_lost_rank_ends_the_streams_of_all() -> None:
    async with house(dp=3, gated=True, num_slots=1) as h:
        for uid in (1, 2, 3, 4):
            h.engine.submit(request(uid))
        await h.step()
        h.source.group.lose(WorkerLost("rank 1: killed by signal 9"))
        await settle_down()
        assert all("rank 1: killed by signal 9" in str(h.sink.end_of(uid)) for uid in (1, 2, 3))
        assert h.engine.is_serving
        h.source.group.gated = False
        h.source.group.let_go()
        await h.sink.wait_for_end(4)
        assert tuple(h.sink.tokens[4]) == true_stream(request(4))


@asynchronous
async def test_a_result_without_one_ranks_batch_ends_the_life_not_the_engine() -> None:
    async with house(dp=2) as h:
        group = h.source.group
        run = group.run

        def forget_a_batch(plan: StepPlan) -> StepResult:
            result = run(plan)
            return replace(result, batches=result.batches[:1])

        group.run = forget_a_batch  # type: ignore[method-assign]
        h.engine.submit(request(1))
        await h.sink.wait_for_end(1)
        assert "StalePlan" in str(h.sink.end_of(1))
        await settle_down()
        h.engine.submit(request(2))
        await h.sink.wait_for_end(2)
        assert h.sink.end_of(2) == LENGTH


@asynchronous
async def test_an_answer_that_does_not_add_up_ends_that_request_alone() -> None:
    async with house() as h:
        h.source.group.corrupt_uids.add(1)
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
        h.source.group.fail_step(RuntimeError("boom"))
        await settle_down()
        for uid in (1, 2):
            assert isinstance(h.sink.end_of(uid), InternalError)
            assert "boom" in str(h.sink.end_of(uid))
        assert h.engine.is_serving
        h.source.group.gated = False
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
            h.source.group.lose(WorkerLost("gone"))
            await settle_down()
            assert isinstance(h.sink.end_of(1), Unavailable)
            assert isinstance(h.sink.end_of(2), InternalError)
            assert "the engine has ended" in str(h.sink.end_of(2))
            assert not h.engine.is_serving
            assert (h.states, h.engine.has_ended) == ([True, False, False], True), "told of the loss, and of the end"
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
        engine = Engine(SettingsInForce(SETTINGS), source, sink)
        await engine.start()
        for uid in (1, 2):
            engine.submit(request(uid))
        await settle_down()
        engine.submit(request(3))
        source.group.lose(WorkerLost("gone"))
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
        h.source.group.lose(WorkerLost("gone"))
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
        h.source.group.lose(WorkerLost("gone"))
        await settle_down()
        stopping = asyncio.create_task(h.engine.stop(drain_s=60))
        await settle_down()
        h.source.release_restarts.set()
        await settle_down()
        h.source.group.gated = False
        h.source.group.let_go()
        await stopping
        assert h.sink.end_of(2) == LENGTH
        assert h.states == [True, False]
