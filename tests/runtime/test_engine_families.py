"""Families in the engine: one submit, a stream and an end for each sequence, one name that all of them share."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from fakes import engine_house
from fakes.engine_house import LENGTH, House, asynchronous, settle_down
from fakes.requests import request
from fakes.worker import true_stream

from configs.schema import SchedulerSettings, ServeSettings
from runtime.front.errors import (
    AbortedByOperator,
    DuplicateRequest,
    InternalError,
    InvalidRequest,
    SlowReader,
    Unavailable,
)
from runtime.live import EarlyEnd, RequestState
from runtime.request import FinishReason, seed_of_sequence
from workers.plan import StepPlan, StepResult, WorkerLost

# Steps of 8 rows: a prompt of 12 tokens is read in two, and the fork is in the third.
SMALL_STEPS = ServeSettings(scheduler=SchedulerSettings(max_step_tokens=8, max_waiting=3))
READING = 12
house = functools.partial(engine_house.house, num_pages=(40, 40))


async def let_all_go(h: House) -> None:
    h.source.group.gated = False
    h.source.group.let_go()
    await settle_down()


@asynchronous
async def test_each_sequence_has_its_own_stream_usage_and_end() -> None:
    async with house() as h:
        uid = h.engine.next_uid(3)
        wanted = request(uid, num_prompt=10, max_tokens=6, n=3)
        h.engine.submit(wanted)
        assert h.engine.next_uid() == uid + 3
        await h.sink.wait_for_end(uid, uid + 1, uid + 2)
        await settle_down()
        for each in range(uid, uid + 3):
            assert tuple(h.sink.tokens[each]) == true_stream(wanted)
            assert h.sink.end_of(each) == LENGTH
            assert h.sink.usage[each].completion == 6
            assert h.sink.usage[each].prompt == 10
        assert [h.sink.usage[each].cached for each in range(uid, uid + 3)] == [0, 9, 9]
        assert [h.sink.usage[each].seed for each in range(uid, uid + 3)] == [
            seed_of_sequence(wanted.sampling.seed, index) for index in range(3)
        ]
        requests = h.engine.statistics().requests
        assert (requests.submitted, requests.ended[FinishReason.LENGTH], requests.prompt_tokens) == (3, 3, 30)
        assert requests.queue_s.count == 3


@asynchronous
async def test_all_of_a_family_have_left_the_queue_when_its_first_enters() -> None:
    async with house(gated=True, settings=SMALL_STEPS) as h:
        h.engine.submit(request(1, num_prompt=READING, n=3))
        await settle_down()
        live, count = h.engine.live_requests(10)
        assert [(each.request.uid, each.state, each.dp_rank) for each in live] == [
            (uid, RequestState.PREFILLING, 0) for uid in (1, 2, 3)
        ]
        statistics = h.engine.statistics()
        assert (count, statistics.running, statistics.waiting) == (3, 3, 0)
        await let_all_go(h)
        await h.sink.wait_for_end(1, 2, 3)


@asynchronous
async def test_a_name_is_free_when_the_last_sequence_has_ended() -> None:
    async with house(gated=True) as h:
        h.engine.submit(request(1, request_id="name", n=2))
        await h.step()
        for uid in (1, 2):
            with pytest.raises(DuplicateRequest):
                h.engine.submit(request(7, request_id="name"))
            h.engine.abort(uid)
        h.engine.submit(request(7, request_id="name"))
        await let_all_go(h)
        await h.sink.wait_for_end(7)


@pytest.mark.parametrize("steps", range(4))
def test_a_client_that_leaves_ends_all_of_them_without_a_word(steps: int) -> None:
    @asynchronous
    async def scenario() -> None:
        async with house(gated=True, settings=SMALL_STEPS) as h:
            h.engine.submit(request(1, num_prompt=READING, n=3))
            await settle_down()
            for _ in range(steps):
                await h.step()
            heard = {uid: len(h.sink.tokens[uid]) for uid in (1, 2, 3)}
            for uid in (1, 2, 3):
                h.engine.abort(uid)
                assert h.engine.check_books() == []
            assert h.num_pages_used == 0
            await let_all_go(h)
            assert {uid: len(h.sink.tokens[uid]) for uid in (1, 2, 3)} == heard
            assert all(h.sink.ends[uid] == [] for uid in (1, 2, 3))
            assert h.engine.statistics().requests.ended[EarlyEnd.ABORTED] == 3

    scenario()


@pytest.mark.parametrize("ended", [1, 2, 3])
@pytest.mark.parametrize("steps", range(4))
def test_one_stream_that_is_given_up_leaves_the_others_alone(steps: int, ended: int) -> None:
    @asynchronous
    async def scenario() -> None:
        async with house(gated=True, settings=SMALL_STEPS) as h:
            wanted = request(1, num_prompt=READING, max_tokens=5, n=3)
            h.engine.submit(wanted)
            await settle_down()
            for _ in range(steps):
                await h.step()
            h.engine.abandon(ended, SlowReader("too slow"))
            await let_all_go(h)
            others = {1, 2, 3} - {ended}
            await h.sink.wait_for_end(*others)
            assert all(tuple(h.sink.tokens[uid]) == true_stream(wanted) for uid in others)
            assert h.sink.ends[ended] == []
            num_cached = sorted(h.sink.usage[uid].cached for uid in others)
            # One of them read the prompt itself, unless the one that did has ended when the fork was planned.
            assert num_cached == ([11, 11] if ended == 1 and steps >= 2 else [0, 11])

    scenario()


@asynchronous
async def test_an_operator_ends_all_sequences_of_a_name() -> None:
    async with house(gated=True, settings=SMALL_STEPS) as h:
        h.engine.submit(request(1, request_id="many", num_prompt=READING, n=3))
        h.engine.submit(request(9, request_id="other"))
        await h.step()
        told = h.engine.abort_by_id(["many", "nobody"])
        assert (told.aborted, told.unknown) == (("many",), ("nobody",))
        assert all(isinstance(h.sink.end_of(uid), AbortedByOperator) for uid in (1, 2, 3))
        await let_all_go(h)
        await h.sink.wait_for_end(9)


@asynchronous
async def test_a_lost_rank_ends_families_that_run_and_no_others() -> None:
    async with house(gated=True, settings=SMALL_STEPS) as h:
        h.engine.submit(request(1, num_prompt=READING, n=3))
        h.engine.submit(request(4, num_prompt=READING, max_tokens=5, n=3))
        await settle_down()
        assert (h.engine.statistics().running, h.engine.statistics().waiting) == (3, 3)
        h.source.group.lose(WorkerLost("gone"))
        await settle_down()
        assert all(isinstance(h.sink.end_of(uid), Unavailable) for uid in (1, 2, 3))
        assert h.engine.statistics().running == 3
        await let_all_go(h)
        await h.sink.wait_for_end(4, 5, 6)
        assert all(h.sink.end_of(uid) == LENGTH for uid in (4, 5, 6))


@asynchronous
async def test_a_prompt_whose_reading_does_not_add_up_ends_all_that_wait_for_it() -> None:
    async with house(settings=SMALL_STEPS) as h:
        run = h.source.group.run

        def say_too_much(plan: StepPlan) -> StepResult:
            result = run(plan)
            (batch,) = result.batches
            emitted = tuple(
                (1,) if epoch == 1 and not samples else tokens
                for epoch, samples, tokens in zip(
                    plan.batches[0].epochs, plan.batches[0].samples, batch.emitted, strict=True
                )
            )
            return replace(result, batches=(replace(batch, emitted=emitted),))

        h.source.group.run = say_too_much  # type: ignore[method-assign]
        h.engine.submit(request(1, num_prompt=READING, n=3))
        h.engine.submit(request(9))
        await h.sink.wait_for_end(1, 2, 3, 9)
        assert all(isinstance(h.sink.end_of(uid), InternalError) for uid in (1, 2, 3))
        assert h.sink.end_of(9) == LENGTH


@asynchronous
async def test_a_family_that_no_rank_could_ever_hold_is_refused() -> None:
    async with house() as h:
        with pytest.raises(InvalidRequest, match="5 sequences") as refusal:
            h.engine.submit(request(1, n=5))
        assert refusal.value.field == "n"
        h.engine.submit(request(1, n=4, max_tokens=3))
        await h.sink.wait_for_end(1, 2, 3, 4)


@asynchronous
async def test_time_limits_end_each_sequence_by_itself_before_the_fork_and_behind_it() -> None:
    for steps in (1, 3):
        async with house(gated=True, settings=SMALL_STEPS) as h:
            h.engine.submit(request(1, num_prompt=READING, max_tokens=9, time_limit_s=5.0, n=3))
            await settle_down()
            for _ in range(steps):
                await h.step()
            h.now_s = 6.0
            await let_all_go(h)
            await h.sink.wait_for_end(1, 2, 3)
            ends = [h.sink.end_of(uid) for uid in (1, 2, 3)]
            assert {end.reason for end in ends} == {FinishReason.TIME_LIMIT}  # type: ignore[union-attr]
