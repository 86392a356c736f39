"""Scheduling over data-parallel ranks: one queue feeds all, each has its own books, and they agree where they must."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes.planners import planner_of
from fakes.requests import request
from fakes.scheduler_bench import Bench
from fakes.worker import describe
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import ServeSettings
from runtime.life import begin_life
from runtime.scheduler.queue import WaitingQueue
from runtime.verification.policy import Fixed, Off
from workers.plan import BatchPlan


def test_an_idle_rank_gets_an_empty_batch() -> None:
    bench = Bench(dp=2)
    bench.submit(request(1))
    busy, idle = bench.step().batches
    assert len(busy.slots) == 1
    assert idle == BatchPlan()


def test_requests_spread_over_ranks_by_what_is_outstanding() -> None:
    bench = Bench(dp=3)
    bench.submit(request(1, max_tokens=9), request(2, max_tokens=4), request(3, max_tokens=6), request(4, max_tokens=3))
    bench.step()
    assert [bench.home_of(uid) for uid in (1, 2, 3)] == [0, 1, 2]
    assert bench.home_of(4) == 1


def test_ranks_number_their_slots_and_pages_for_themselves() -> None:
    bench = Bench(dp=2)
    bench.submit(request(1), request(2))
    (first,), (second,) = (batch.admitted for batch in bench.step().batches)
    assert (first.slot, first.epoch, first.tables) == (second.slot, second.epoch, second.tables)


def test_a_request_goes_where_its_prefix_is_unless_that_rank_has_too_much_to_do() -> None:
    """Pages of 4 tokens. A prompt of 12 known tokens weighs 12 outstanding ones."""
    bench = Bench(dp=2, description=describe(num_pages=(40, 40), max_model_len=99))
    bench.submit(request(1, num_prompt=12, max_tokens=2))
    bench.drain([0])
    # Rank 0 knows the prompt now; both are idle, and a stranger would go to rank 0 as well.
    bench.submit(request(2, num_prompt=3, max_tokens=3))
    bench.step(Off())
    assert bench.home_of(2) == 0
    bench.submit(*(request(uid, num_prompt=12, max_tokens=2, prompt_of=1) for uid in (3, 4)))
    plan = bench.step(Off())
    assert [[new.uid for new in batch.admitted] for batch in plan.batches] == [[3], [4]]


def test_a_release_on_one_rank_touches_no_other() -> None:
    bench = Bench(dp=2)
    bench.submit(request(1, max_tokens=1), request(2, max_tokens=6))
    bench.step()
    first, second = bench.step().batches
    assert (len(first.released_slots), first.slots) == (1, ())
    assert (second.released_slots, len(second.slots)) == ((), 1)


def test_the_head_waits_only_while_no_rank_has_room() -> None:
    """Rank 0 is full of the first; the second is too large for what is left anywhere but on rank 1."""
    bench = Bench(dp=2)
    bench.submit(request(1, num_prompt=25, max_tokens=10), request(2, num_prompt=25, max_tokens=10))
    bench.step()
    assert [bench.home_of(uid) for uid in (1, 2)] == [0, 1]
    bench.submit(request(3, num_prompt=25, max_tokens=10), request(4))
    assert bench.scheduler.num_openings == 0
    while len(list(bench.scheduler.running)) == 2:
        assert all(batch.admitted == () for batch in bench.step().batches)
    assert bench.scheduler.num_openings > 0
    entered = [new.uid for batch in bench.step().batches for new in batch.admitted]
    assert entered[0] == 3, "the head goes first, however large"


def test_openings_are_the_free_slots_of_ranks_with_room_for_the_head() -> None:
    bench = Bench(dp=3)
    assert bench.scheduler.num_openings == 12
    bench.submit(request(1, num_prompt=20, max_tokens=10))
    bench.step()
    assert bench.scheduler.num_openings == 11
    bench.submit(request(2, num_prompt=20, max_tokens=10))
    assert bench.scheduler.num_openings == 8, "rank 0 has slots, and no pages for it"


def test_a_long_prefill_on_one_rank_keeps_no_other_waiting() -> None:
    description = describe(num_pages=(40, 40), max_model_len=150)
    bench = Bench(dp=2, max_step_tokens=8, description=description)
    bench.submit(request(1, num_prompt=80, max_tokens=2), request(2, num_prompt=2, max_tokens=9))
    bench.step(Off())
    assert [bench.home_of(uid) for uid in (1, 2)] == [0, 1]
    for _ in range(8):
        prefill, decode = bench.step(Off()).batches
        assert (prefill.num_known, prefill.samples) == ((8,), (False,))
        assert (len(decode.slots), decode.samples) == (1, (True,))
    assert 2 not in bench.scheduler.schedulers[1].ledger, "it has all its tokens; the prompt of the other is half read"
    assert bench.scheduler.schedulers[0].ledger[1].is_prefilling


def test_drafting_is_agreed_and_waiting_drafts_are_each_ranks_own() -> None:
    bench = Bench(dp=2)
    bench.submit(request(1, max_tokens=9))
    bench.step(Fixed(3))
    bench.submit(request(2, max_tokens=9))
    plan = bench.step(Fixed(2))
    assert [batch.num_drafts for batch in plan.batches] == [(3,), (0,)]
    assert (plan.gamma, plan.feed_drafter, plan.catches_up) == (2, True, False)


def test_rows_unseen_by_one_ranks_drafter_make_all_ranks_catch_up() -> None:
    bench = Bench(dp=2)
    bench.submit(request(1, max_tokens=20))
    bench.step(Off())
    assert not bench.step(Off()).catches_up, "the drafter does not run at all"
    bench.submit(request(2, max_tokens=20))
    plan = bench.step(Fixed(2))
    assert [batch.num_unfed for batch in plan.batches] == [(4,), (0,)]
    assert plan.catches_up
    assert not bench.step(Fixed(2)).catches_up


def test_margins_are_asked_of_all_while_one_rank_reports_its_rounds() -> None:
    bench = Bench(dp=2)
    bench.submit(request(1, max_tokens=2, report_rounds=True), request(2, max_tokens=9))
    assert [bench.step(Off()).report_margins for _ in range(4)] == [True, True, False, False]


def test_the_next_life_knows_no_prefix_and_repeats_no_epoch() -> None:
    settings = ServeSettings()
    bench = Bench(dp=2)
    first = begin_life(bench.group, WaitingQueue(), settings, None, now_s=0)
    known = request(1, num_prompt=12, max_tokens=2)
    first.scheduler.queue.push(known)
    plan = first.scheduler.plan(planner_of(Off()))
    first.scheduler.release(1)
    second = begin_life(bench.group, first.scheduler.queue, settings, first, now_s=1)
    second.scheduler.queue.push(request(2, num_prompt=3, max_tokens=3))
    second.scheduler.queue.push(request(3, num_prompt=12, max_tokens=2, prompt_of=1))
    later = second.scheduler.plan(planner_of(Off()))
    # Rank 0 has 11 tokens before it; the prompt of 12, if it were known there, would go there all the same.
    assert [[new.uid for new in batch.admitted] for batch in later.batches] == [[2], [3]]
    assert later.step_id > plan.step_id
    assert min(new.epoch for batch in later.batches for new in batch.admitted) > plan.batches[0].admitted[0].epoch


@pytest.mark.parametrize("dp", [1, 2])
def test_a_sequence_that_two_ranks_claim_is_found(dp: int) -> None:
    bench = Bench(dp=dp)
    bench.submit(request(1))
    bench.step()
    bench.scheduler.schedulers[-1].ledger.open(7, (1, 2), 4)
    assert any("7" in problem for problem in bench.scheduler.check_integrity())


@given(
    dp=st.integers(1, 3),
    shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 15), st.integers(0, 2)), min_size=1, max_size=14),
    gammas=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    max_step_tokens=st.integers(6, 40),
    held=st.lists(st.lists(st.integers(0, 13), max_size=3), max_size=30),
)
def test_whatever_the_mix_all_ends_right_nobody_starves_and_pools_return(
    dp: int,
    shapes: list[tuple[int, int, int]],
    gammas: list[int],
    max_step_tokens: int,
    held: list[list[int]],
) -> None:
    """held: per step, those that await a verdict, so that pauses of the drafter meet sequences left out of steps.

    The fake ranks check every plan, `num_unfed` among it, and the bench every stream.
    """
    bench = Bench(dp=dp, max_step_tokens=max_step_tokens)
    for uid, (num_prompt, max_tokens, priority) in enumerate(shapes):
        bench.submit(request(uid, num_prompt=num_prompt, max_tokens=max_tokens, priority=priority))
    order = sorted(bench.requests, key=lambda uid: (bench.requests[uid].priority, uid))
    admitted: list[int] = []
    unserved: Counter[int] = Counter()
    for number in range(400):
        if not bench.scheduler.has_work:
            break
        waiting_for_verdict = set(held[number]) if number < len(held) else set()
        if waiting_for_verdict.issuperset(sequence.uid for sequence in bench.scheduler.running):
            waiting_for_verdict = set()
        decoding = []
        for sequence in bench.scheduler.running:
            sequence.awaiting_verdict = sequence.uid in waiting_for_verdict
            if not sequence.awaiting_verdict and not sequence.is_prefilling:
                decoding.append((sequence.uid, bench.home_of(sequence.uid), sequence.slot))
        gamma = gammas[number % len(gammas)]
        plan = bench.step(Fixed(gamma) if gamma else Off())
        for uid, dp_rank, slot in decoding:
            unserved[uid] = 0 if slot in plan.batches[dp_rank].slots else unserved[uid] + 1
            assert unserved[uid] < bench.group.description.num_slots, f"{uid} starves"
        entered = {new.uid for batch in plan.batches for new in batch.admitted}
        assert entered == set(order[len(admitted) : len(admitted) + len(entered)]), "the queue's order is strict"
        admitted += sorted(entered, key=order.index)
    assert not bench.scheduler.has_work
    assert admitted == order
    bench.check_baseline()
