"""Requests whose time is up: they end with what is there, wherever they are, and every count stays right."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fakes.engine_house import LENGTH, SETTINGS, House, asynchronous, house, settle_down
from fakes.requests import request
from fakes.worker import FakeSource, describe, true_stream

from configs.schema import ClusterSettings, SchedulerSettings
from runtime.front.errors import Unavailable
from runtime.live import EarlyEnd
from runtime.request import Finish, FinishReason, ReportParams
from workers.plan import WorkerLost

TIME_LIMIT = Finish(reason=FinishReason.TIME_LIMIT)


def steps_of(h: House, uid: int) -> list[int]:
    """The steps in which the only rank ran a sequence."""
    plans = [(plan.step_id, plan.batches[0]) for plan in h.source.plans]
    (slot,) = (new.slot for _, batch in plans for new in batch.admitted if new.uid == uid)
    return [step_id for step_id, batch in plans if slot in batch.slots]


@pytest.mark.parametrize("accept", [0.0, 0.6, 1.0])
@asynchronous
async def test_the_round_in_flight_is_the_last_one(accept: float) -> None:
    """Its tokens are kept, nothing is scheduled after it, and another request does not notice."""
    h = House(FakeSource(describe(), gated=True, accept=accept), SETTINGS)
    await h.engine.start()
    limited, other = request(1, max_tokens=20, time_limit_s=5.0), request(2, max_tokens=8)
    for one in (limited, other):
        h.engine.submit(one)
    h.now_s = 4.0
    for _ in range(3):
        await h.step()
    num_before = len(h.sink.tokens[1])
    h.now_s = 5.0
    await h.step()
    await h.step()  # what a round brought is told while the next one runs
    assert h.sink.end_of(1) == TIME_LIMIT
    tokens = tuple(h.sink.tokens[1])
    assert num_before < len(tokens) < 20
    assert tokens == true_stream(limited)[: len(tokens)]
    usage = h.sink.usage[1]
    assert usage.completion == len(tokens) == usage.accepted + usage.rounds - usage.trimmed
    assert (usage.rounds, usage.trimmed) == (4, 0)
    while not h.sink.ends[2]:
        await h.step()
    assert (h.sink.end_of(2), tuple(h.sink.tokens[2])) == (LENGTH, true_stream(other))
    assert steps_of(h, 1) == [1, 2, 3, 4]
    statistics = h.engine.statistics()
    assert statistics.requests.ended == {FinishReason.TIME_LIMIT: 1, FinishReason.LENGTH: 1}
    assert statistics.requests.finished == 2
    assert statistics.emitted == len(tokens) + 8 == statistics.requests.output_tokens.total
    assert h.engine.check_books() == []
    await h.engine.stop(0)
    assert h.source.violations == h.sink.violations == []


@asynchronous
async def test_time_counts_from_intake_and_a_limit_that_is_not_reached_changes_nothing() -> None:
    async with house(gated=True, num_slots=1) as h:
        h.now_s = 100.0
        h.engine.submit(request(1, max_tokens=2))
        h.engine.submit(request(2, max_tokens=12, time_limit_s=10.0))
        h.engine.submit(request(3, max_tokens=2, time_limit_s=1000.0))
        h.now_s = 109.0
        while not h.sink.ends[1]:
            await h.step()
        await h.step()
        assert h.sink.tokens[2], "it waited for most of its time and runs now"
        h.now_s = 110.0
        while not h.sink.ends[3]:
            await h.step()
        assert [h.sink.end_of(uid) for uid in (1, 2, 3)] == [LENGTH, TIME_LIMIT, LENGTH]


@asynchronous
async def test_one_that_waits_and_one_whose_prompt_is_being_read_end_without_a_token() -> None:
    short_steps = SETTINGS.model_copy(update={"scheduler": SchedulerSettings(max_step_tokens=8, max_waiting=3)})
    async with house(gated=True, num_slots=2, settings=short_steps) as h:
        h.engine.submit(request(1, num_prompt=20, max_tokens=2, time_limit_s=5.0))
        h.engine.submit(request(2, num_prompt=4))
        h.engine.submit(request(3, time_limit_s=5.0))
        await settle_down()
        assert (h.engine.statistics().running, h.engine.statistics().waiting) == (2, 1)
        h.now_s = 6.0
        await h.step()
        assert (h.engine.statistics().running, h.engine.statistics().waiting) == (1, 0)
        await h.step()
        for uid in (1, 3):
            (event,) = (event for event in h.sink.token_events if event.uid == uid)
            assert (event.tokens, event.finish, event.rounds) == ((), TIME_LIMIT, ())
            usage = event.usage
            assert (usage.completion, usage.rounds, usage.prompt, usage.seed) == (0, 0, 20 if uid == 1 else 3, uid)
        counted = h.engine.statistics().requests
        assert counted.ended == {FinishReason.TIME_LIMIT: 2}
        assert (counted.latency_s.total, sum(counted.latency_s.counts)) == (12.0, 2)
        assert (counted.output_tokens.total, sum(counted.output_tokens.counts)) == (0, 2)
        assert sum(counted.queue_s.counts) == 1, "the other one never had a slot"
        assert sum(counted.prefill_s.counts) == sum(counted.decode_s.counts) == 0
        assert counted.prompt_tokens == 4, "those of the one that runs"
        while not h.sink.ends[2]:
            await h.step()
        assert tuple(h.sink.tokens[2]) == true_stream(request(2, num_prompt=4))


@asynchronous
async def test_what_was_read_of_a_prompt_until_its_time_was_up_is_told() -> None:
    short_steps = SETTINGS.model_copy(update={"scheduler": SchedulerSettings(max_step_tokens=8)})
    async with house(gated=True, settings=short_steps) as h:
        limited = replace(
            request(1, num_prompt=20, time_limit_s=5.0), report=ReportParams(num_prompt_logprobs=1, num_logprobs=0)
        )
        h.engine.submit(limited)
        await settle_down()
        await h.step()
        h.now_s = 6.0
        await h.step()
        await h.step()
        (event,) = h.sink.token_events
        assert (event.tokens, event.finish) == ((), TIME_LIMIT)
        assert tuple(one.token for one in event.prompt_logprobs) == limited.prompt[1:17]


@asynchronous
async def test_an_end_of_its_own_in_the_last_round_goes_before_the_time() -> None:
    async with house(gated=True) as h:
        by_length = request(1, max_tokens=1, time_limit_s=5.0)
        stop_id = true_stream(request(2))[0]
        h.engine.submit(by_length)
        h.engine.submit(request(2, stop_token_ids=(stop_id,), time_limit_s=5.0))
        h.engine.submit(request(3, time_limit_s=5.0))
        await settle_down()
        h.now_s = 9.0
        await h.step()
        await h.step()
        assert h.sink.end_of(1) == LENGTH
        assert h.sink.end_of(2) == Finish(reason=FinishReason.STOP_TOKEN, stop_token_id=stop_id)
        assert h.sink.end_of(3) == TIME_LIMIT
        assert [len(h.sink.tokens[uid]) for uid in (1, 2, 3)] == [1, 1, 1]


@asynchronous
async def test_a_stop_string_in_the_last_round_goes_before_the_time_and_cuts_its_tokens() -> None:
    """And without one the verdict lets the time limit stand."""
    async with house(gated=True) as h:
        for uid in (1, 2):
            h.engine.submit(request(uid, max_tokens=30, stop_strings=("x",), time_limit_s=5.0))
        await h.step()
        await h.step()
        h.sink.stop_after[1] = len(h.sink.tokens[1]) + 1
        h.now_s = 5.0
        await h.step()
        assert h.sink.end_of(1) == "stop string"
        assert h.sink.end_of(2) == TIME_LIMIT
        assert all(event.needs_verdict for event in h.sink.token_events)
        statistics = h.engine.statistics()
        assert statistics.requests.ended == {FinishReason.STOP_STRING: 1, FinishReason.TIME_LIMIT: 1}
        num_cut = len(h.sink.tokens[1]) - h.sink.stop_after[1]
        assert statistics.emitted == sum(map(len, h.sink.tokens.values())) - num_cut
        assert statistics.check_integrity() == []


@pytest.mark.parametrize("gives_verdicts", [True, False])
@asynchronous
async def test_a_stop_string_that_the_end_of_the_text_completes_goes_before_the_time(gives_verdicts: bool) -> None:
    """The last event of one that no round ran for needs a verdict too."""
    async with house(gated=True, num_slots=1) as h:
        h.engine.submit(request(1, max_tokens=30))
        await settle_down()
        h.engine.submit(request(2, stop_strings=("x",), time_limit_s=5.0))
        h.engine.submit(request(3, stop_strings=("x",), time_limit_s=5.0))
        h.sink.stop_after[2] = 0
        h.sink.gives_verdicts = gives_verdicts
        h.now_s = 5.0
        await h.step()
        assert h.sink.end_of(2) == ("stop string" if gives_verdicts else TIME_LIMIT)
        assert h.sink.end_of(3) == TIME_LIMIT
        expected = {FinishReason.STOP_STRING: 1, FinishReason.TIME_LIMIT: 1}
        assert h.engine.statistics().requests.ended == (expected if gives_verdicts else {FinishReason.TIME_LIMIT: 2}), (
            "the front has had that end"
        )


@asynchronous
async def test_an_abort_while_the_last_round_runs_goes_before_the_time() -> None:
    async with house(gated=True) as h:
        h.engine.submit(request(1, time_limit_s=5.0))
        await settle_down()
        h.now_s = 5.0
        h.engine.abort(1)
        await h.step()
        await h.step()
        assert (h.sink.ends[1], h.sink.tokens[1]) == ([], [])
        assert h.engine.statistics().requests.ended == {EarlyEnd.ABORTED: 1}


@asynchronous
async def test_each_data_parallel_rank_ends_its_own() -> None:
    async with house(dp=2, gated=True) as h:
        for uid in (1, 2, 3, 4):
            h.engine.submit(request(uid, max_tokens=12, time_limit_s=None if uid == 4 else 5.0))
        await settle_down()
        assert [use.running for use in h.engine.statistics().dp_ranks] == [2, 2]
        h.now_s = 5.0
        await h.step()
        assert sorted(use.running for use in h.engine.statistics().dp_ranks) == [0, 1]
        while not h.sink.ends[4]:
            await h.step()
        assert [h.sink.end_of(uid) for uid in (1, 2, 3, 4)] == [TIME_LIMIT] * 3 + [LENGTH]


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("num_prompt", [1, 4, 20])
@asynchronous
async def test_the_sequences_of_a_request_end_together_at_every_stage(num_prompt: int, num_steps: int) -> None:
    """Waiting, while the first reads the prompt for all, when the others have branched off, and in the middle."""
    short_steps = SETTINGS.model_copy(update={"scheduler": SchedulerSettings(max_step_tokens=8, max_waiting=3)})
    async with house(gated=True, num_pages=(40, 40), settings=short_steps) as h:
        wanted = request(1, num_prompt=num_prompt, max_tokens=16, n=3, time_limit_s=5.0)
        h.engine.submit(wanted)
        h.engine.submit(request(4, max_tokens=3))
        for _ in range(num_steps):
            await h.step()
        h.now_s = 5.0
        await h.step()
        await h.step()
        assert [h.sink.end_of(uid) for uid in (1, 2, 3)] == [TIME_LIMIT] * 3
        while not h.sink.ends[4]:
            await h.step()
        assert (h.sink.end_of(4), tuple(h.sink.tokens[4])) == (LENGTH, true_stream(request(4, max_tokens=3)))
        for uid in (1, 2, 3):
            usage = h.sink.usage[uid]
            assert usage.completion == len(h.sink.tokens[uid]) == usage.accepted + usage.rounds - usage.trimmed
        assert h.engine.statistics().requests.ended == {FinishReason.TIME_LIMIT: 3, FinishReason.LENGTH: 1}
        assert h.engine.statistics().running == 0


@asynchronous
async def test_those_that_wait_for_lost_ranks_end_when_their_time_is_up() -> None:
    """Not before, one after the other, and the rest is served when the ranks are back."""
    async with house(gated=True, num_slots=1) as h:
        h.engine.submit(request(1))
        await settle_down()
        for uid, time_limit_s in ((2, 0.02), (3, 0.01), (4, 1000.0)):
            h.engine.submit(request(uid, max_tokens=1, time_limit_s=time_limit_s))
        h.source.hold_restarts = True
        h.source.group.lose(WorkerLost("gone"))
        await h.sink.wait_for_end(1)
        assert isinstance(h.sink.end_of(1), Unavailable)
        later = asyncio.Event()
        asyncio.get_running_loop().call_later(0.03, later.set)
        await later.wait()
        assert (h.sink.ends[2], h.sink.ends[3]) == ([], []), "the engine's clock stands still"
        h.now_s = 0.01
        await h.sink.wait_for_end(3)
        assert h.sink.ends[2] == []
        h.now_s = 0.02
        await h.sink.wait_for_end(2)
        assert (h.sink.end_of(2), h.sink.end_of(3), h.sink.ends[4]) == (TIME_LIMIT, TIME_LIMIT, [])
        assert h.engine.statistics().waiting == 1
        assert not h.engine.is_serving
        h.source.release_restarts.set()
        await settle_down()
        await h.step()
        await settle_down()
        assert h.sink.end_of(4) == LENGTH
        assert h.engine.statistics().requests.ended == {
            EarlyEnd.FAILED: 1,
            FinishReason.TIME_LIMIT: 2,
            FinishReason.LENGTH: 1,
        }


@asynchronous
async def test_a_rank_that_is_lost_beyond_the_limit_costs_nothing_but_the_round_in_flight() -> None:
    async with house(gated=True) as h:
        h.engine.submit(request(1, max_tokens=12, time_limit_s=5.0))
        h.engine.submit(request(2, max_tokens=12, time_limit_s=50.0))
        await h.step()
        await h.step()
        h.now_s = 6.0
        h.source.group.lose(WorkerLost("gone"))
        await h.sink.wait_for_end(1, 2)
        assert h.sink.end_of(1) == TIME_LIMIT
        assert len(h.sink.tokens[1]) == h.sink.usage[1].completion >= 2
        assert isinstance(h.sink.end_of(2), Unavailable)


@asynchronous
async def test_what_was_overdue_when_the_ranks_came_back_does_not_run() -> None:
    """Here the start comes before the timer's turn."""
    async with house(gated=True, num_slots=1) as h:
        h.engine.submit(request(1))
        await settle_down()
        h.engine.submit(request(2, time_limit_s=100.0))
        h.source.hold_restarts = True
        h.source.group.lose(WorkerLost("gone"))
        await settle_down()
        h.now_s = 100.0
        h.source.release_restarts.set()
        await settle_down()
        assert h.sink.end_of(2) == TIME_LIMIT
        assert h.source.group.plans == []


@asynchronous
async def test_patience_with_lost_ranks_ends_before_a_long_time_limit() -> None:
    impatient = SETTINGS.model_copy(update={"cluster": ClusterSettings(start_timeout_s=0.01)})
    async with house(gated=True, num_slots=1, settings=impatient) as h:
        h.engine.submit(request(1))
        await settle_down()
        h.engine.submit(request(2, time_limit_s=100.0))
        h.source.hold_restarts = True
        h.source.group.lose(WorkerLost("gone"))
        await h.sink.wait_for_end(2)
        assert isinstance(h.sink.end_of(2), Unavailable)
        h.source.release_restarts.set()
