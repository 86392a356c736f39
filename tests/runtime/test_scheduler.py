"""One data-parallel rank's scheduler: rows within the step, strict admission, no starvation, nothing that leaks."""

from __future__ import annotations

import itertools

import pytest
from fakes.planners import planner_of
from fakes.requests import request
from fakes.scheduler_bench import Bench
from fakes.worker import describe
from hypothesis import given
from hypothesis import strategies as st

from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.rows import share_rows
from runtime.verification.policy import Fixed, Off, Policy
from runtime.verification.speculation import Load, Traits
from workers.plan import VERIFY_EVERYTHING


def admitted_uids(bench: Bench) -> list[int]:
    return [new.uid for plan in bench.group.plans for new in plan.batches[0].admitted]


def test_a_prompt_is_cut_into_chunks_that_cover_it_and_the_last_one_samples() -> None:
    bench = Bench(max_step_tokens=8)
    bench.submit(request(1, num_prompt=19, max_tokens=4))
    plans = [bench.batch() for _ in range(3)]
    assert [plan.num_known for plan in plans] == [(8,), (8,), (3,)]
    assert [plan.samples for plan in plans] == [(False,), (False,), (True,)]
    assert [plan.max_committed for plan in plans] == [(0,), (8,), (16,)]


def test_a_decode_row_carries_the_drafts_of_the_plan_in_which_it_last_sampled() -> None:
    bench = Bench()
    bench.submit(request(1, max_tokens=20))
    drafts = [bench.batch(policy).num_drafts for policy in (Fixed(3), Fixed(1), Off(), Fixed(0), Fixed(2), Off())]
    assert drafts == [(0,), (3,), (1,), (0,), (0,), (2,)]


@pytest.mark.parametrize("policy", [Off(), Fixed(0)])
def test_off_and_gamma_zero_leave_the_drafter_alone(policy: Policy) -> None:
    speculation = planner_of(policy).decide(1, [Load()])
    assert (speculation.gamma, speculation.feed_drafter) == (0, False)
    assert speculation.batches[0].verify_budget == VERIFY_EVERYTHING, "drafts from before the switch are still verified"


@pytest.mark.parametrize("num_running", [0, 64])
def test_fixed_gamma_drafts_as_much_under_any_load(num_running: int) -> None:
    load = Load(
        uids=tuple(range(num_running)),
        traits=(Traits(0, 0, None),) * num_running,
        waiting=(0,) * num_running,
        committed=(9,) * num_running,
        left=(1,) * num_running,
    )
    speculation = planner_of(Fixed(3)).decide(1, [Load(), load])
    assert (speculation.gamma, speculation.feed_drafter) == (3, True)
    assert [batch.verify_budget for batch in speculation.batches] == [VERIFY_EVERYTHING] * 2
    assert not any(batch.limits or batch.forced for batch in speculation.batches)


def test_rows_that_the_drafter_has_not_seen_are_counted_until_it_is_fed() -> None:
    """Two rows of drafts wait when drafting stops: they count as if all of them were committed."""
    bench = Bench()
    bench.submit(request(1, num_prompt=5, max_tokens=30))
    policies = (Fixed(2), Off(), Off(), Fixed(0), Fixed(1), Off(), Fixed(2), Fixed(2))
    assert [bench.batch(policy).num_unfed for policy in policies] == [(0,), (0,), (3,), (4,), (5,), (0,), (2,), (0,)]


def test_a_sequence_left_out_of_a_step_that_feeds_the_drafter_still_lacks_its_rows() -> None:
    bench = Bench()
    bench.submit(request(1, max_tokens=12), request(2, max_tokens=12))
    for _ in range(3):
        bench.step(Off())
    held = bench.one.ledger[1]
    held.awaiting_verdict = True
    assert bench.batch(Fixed(1)).num_unfed == (5,)
    held.awaiting_verdict = False
    plan = bench.batch(Fixed(1))
    assert dict(zip(plan.slots, plan.num_unfed, strict=True))[held.slot] == 5
    assert bench.batch(Fixed(1)).num_unfed == (0, 0)


def test_a_new_tenant_of_a_slot_starts_with_a_drafter_that_lacks_nothing() -> None:
    bench = Bench(description=describe(num_slots=1))
    bench.submit(request(1, max_tokens=3), request(2, max_tokens=3))
    plans = [bench.batch(Off()) for _ in range(4)]
    assert [plan.num_unfed for plan in plans] == [(0,), (3,), (4,), (0,)]


def test_the_head_of_the_queue_is_not_passed_by() -> None:
    """12 pages: the first takes 6, the second needs 8 and waits, and the third, which would fit, waits behind it."""
    bench = Bench()
    bench.submit(request(1, num_prompt=9, max_tokens=10), request(2, num_prompt=17, max_tokens=10), request(3))
    assert [new.uid for new in bench.batch().admitted] == [1]
    assert bench.scheduler.num_openings == 0
    for _ in range(10):  # a token of the first in each
        if 1 in bench.one.ledger:
            assert [new.uid for new in bench.batch().admitted] == []
    assert [new.uid for new in bench.batch().admitted] == [2, 3]


def test_lower_priority_numbers_go_first_and_equals_by_arrival() -> None:
    bench = Bench(description=describe(num_slots=1))
    bench.submit(request(1), request(2, priority=1), request(3, priority=-1), request(4))
    bench.drain()
    assert admitted_uids(bench) == [3, 1, 4, 2]


def test_a_request_leaves_the_queue_from_the_middle() -> None:
    queue = WaitingQueue()
    for uid in range(5):
        queue.push(request(uid, priority=uid % 2))
    assert queue.remove(2).uid == 2
    assert [each.uid for each in queue] == [0, 4, 1, 3]
    assert 2 not in queue


def test_released_slots_go_into_the_next_plan_and_may_be_filled_by_it() -> None:
    bench = Bench(description=describe(num_slots=1))
    bench.submit(request(1, max_tokens=1), request(2))
    first = bench.batch()
    second = bench.batch()
    assert second.released_slots == first.slots
    assert [new.slot for new in second.admitted] == list(first.slots)
    assert second.epochs > first.epochs


def test_the_worker_hears_of_the_last_release_though_nothing_runs() -> None:
    bench = Bench()
    bench.submit(request(1, max_tokens=1))
    bench.step()
    assert bench.scheduler.has_work
    assert bench.batch().slots == ()
    assert bench.group.tenants == []
    assert not bench.scheduler.has_work


def test_who_awaits_a_verdict_is_left_out() -> None:
    bench = Bench()
    bench.submit(request(1), request(2))
    bench.step()
    held = bench.one.ledger[1]
    held.awaiting_verdict = True
    assert held.slot not in bench.batch().slots
    held.awaiting_verdict = False
    assert held.slot in bench.batch().slots


def test_margins_are_asked_for_while_a_sequence_that_reports_its_rounds_draws() -> None:
    bench = Bench(max_step_tokens=8)
    bench.submit(request(1, num_prompt=12, max_tokens=2, report_rounds=True), request(2, max_tokens=8))
    plans = [bench.step(Off()) for _ in range(4)]
    assert [plan.report_margins for plan in plans] == [False, True, True, False]
    assert [sum(plan.batches[0].samples) for plan in plans] == [0, 2, 2, 1]


def test_decodes_that_found_no_room_go_first_in_the_next_step() -> None:
    """Three decodes of 5 rows in steps of 12 rows: two run at a time."""
    bench = Bench(max_step_tokens=12, accept=0.0)
    bench.submit(*(request(uid, max_tokens=8, num_prompt=1) for uid in range(1, 4)))
    bench.step(Fixed(4))
    served = [frozenset(bench.batch(Fixed(4)).slots) for _ in range(6)]
    assert all(len(slots) == 2 for slots in served)
    assert all(first | second == {1, 2, 3} for first, second in itertools.pairwise(served))


def test_a_step_too_small_for_one_verify_pass_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_step_tokens is 5.*take 6"):
        Bench(max_step_tokens=5)


@given(
    waiting=st.lists(st.integers(0, 8), max_size=80),
    prompt_rows=st.lists(st.integers(1, 300), max_size=10),
    max_rows=st.integers(10, 512),
    verify_budget=st.one_of(st.just(VERIFY_EVERYTHING), st.integers(0, 200)),
)
def test_shared_rows_fit_and_starve_nobody(
    waiting: list[int], prompt_rows: list[int], max_rows: int, verify_budget: int
) -> None:
    shares = share_rows(waiting, prompt_rows, max_rows, verify_budget=verify_budget)

    def rows_of(count: int) -> int:
        """Of the first decodes: a token each, and the drafts that the budget may fall upon."""
        return count + min(sum(waiting[:count]), verify_budget)

    used = rows_of(shares.num_decodes) + sum(shares.chunks)
    widest = 1 + min(max(waiting), verify_budget) if waiting else 0
    assert used <= max_rows
    assert all(1 <= chunk <= rows for chunk, rows in zip(shares.chunks, prompt_rows, strict=False))
    assert all(chunk == rows for chunk, rows in zip(shares.chunks[:-1], prompt_rows, strict=False))
    assert sum(shares.chunks) >= min(sum(prompt_rows), max_rows // 4, max_rows - widest)
    assert shares.num_decodes >= min(1, len(waiting))
    if rows_of(len(waiting)) + sum(prompt_rows) <= max_rows:
        assert (shares.num_decodes, list(shares.chunks)) == (len(waiting), prompt_rows)
    elif sum(shares.chunks) < sum(prompt_rows):
        assert used == max_rows


@given(
    shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 15), st.integers(0, 2)), min_size=1, max_size=12),
    gammas=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    max_step_tokens=st.integers(6, 40),
)
def test_everything_submitted_ends_with_its_tokens_and_every_page_returns(
    shapes: list[tuple[int, int, int]], gammas: list[int], max_step_tokens: int
) -> None:
    bench = Bench(max_step_tokens=max_step_tokens)
    for uid, (num_prompt, max_tokens, priority) in enumerate(shapes):
        bench.submit(request(uid, num_prompt=num_prompt, max_tokens=max_tokens, priority=priority))
    bench.drain(gammas)
    assert admitted_uids(bench) == sorted(bench.requests, key=lambda uid: (bench.requests[uid].priority, uid))
    bench.check_baseline()
