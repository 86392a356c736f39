"""The engine end to end on a fake worker that dies, errs or comes back smaller, and what a drain leaves behind."""

from __future__ import annotations

import asyncio

import pytest
from fakes.engine_house import LENGTH, SETTINGS, asynchronous, house, settle_down
from fakes.requests import request
from fakes.worker import describe, true_stream

from configs.schema import ClusterSettings
from runtime.events import ErrorEvent, TokenEvent
from runtime.front.errors import InternalError, InvalidRequest, OutriderError, Unavailable
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
