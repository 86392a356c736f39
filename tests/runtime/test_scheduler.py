"""The scheduler's promises: rows within the step, strict admission, no starvation, slots and pages that come back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from fakes.requests import request
from fakes.worker import FakeWorker, describe, true_stream
from hypothesis import given
from hypothesis import strategies as st

from runtime.request import Request
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.rows import share_rows
from runtime.scheduler.scheduler import Scheduler
from runtime.settlement import outcomes
from runtime.verification.planner import NO_SPECULATION, Load, plan_speculation
from runtime.verification.policy import Fixed, Off, Policy
from state.ledger import Ledger
from workers.plan import VERIFY_EVERYTHING, StepPlan, WorkerDescription

IDLE = Load(num_decoding=0, num_prefilling=0, num_waiting=0)


class Bench:
    """A scheduler on a fake worker, without engine or event loop."""

    def __init__(
        self, *, max_step_tokens: int = 32, description: WorkerDescription | None = None, accept: float = 0.6
    ) -> None:
        self.description = description or describe()
        ledger = Ledger(
            cache_groups=self.description.cache_groups,
            num_pages=self.description.num_pages,
            page_size=self.description.page_size,
            num_slots=self.description.num_slots,
        )
        self.queue = WaitingQueue()
        self.scheduler = Scheduler(
            self.queue,
            ledger,
            worker_epoch=1,
            max_step_tokens=max_step_tokens,
            gamma_max=self.description.gamma_max,
        )
        self.worker = FakeWorker(self.description, max_step_tokens=max_step_tokens, accept=accept)
        self.requests: dict[int, Request] = {}

    def submit(self, *requests: Request) -> None:
        for each in requests:
            self.requests[each.uid] = each
            self.queue.push(each)

    def drain(self, gammas: Sequence[int] = (3,)) -> None:
        """Steps until nothing is left to do, with these γ in turn. Fails when that takes longer than it ever should."""
        for gamma in itertools.islice(itertools.cycle(gammas), 1000):
            if not self.scheduler.has_work:
                return
            self.step(Fixed(gamma))
        pytest.fail("after 1000 steps there is work left")

    def step(self, policy: Policy = Fixed(3)) -> StepPlan:  # noqa: B008
        """Plans, executes, commits; lets go of what has all its tokens."""
        plan = self.scheduler.plan(policy)
        result = self.worker.run(plan)
        for outcome in outcomes(plan, result):
            sequence = self.scheduler.ledger.find(outcome.slot, outcome.epoch)
            assert sequence is not None
            sequence.commit(outcome.num_known, outcome.emitted, plan.gamma if plan.feed_drafter else 0)
            if len(sequence.log.emitted) == self.requests[sequence.uid].stopping.max_tokens:
                assert tuple(sequence.log.emitted) == true_stream(self.requests[sequence.uid])
                self.scheduler.release(sequence.uid)
        assert self.scheduler.ledger.check_integrity() == []
        return plan


def test_a_prompt_is_cut_into_chunks_that_cover_it_and_the_last_one_samples() -> None:
    bench = Bench(max_step_tokens=8)
    bench.submit(request(1, num_prompt=19, max_tokens=4))
    plans = [bench.step() for _ in range(3)]
    assert [plan.num_known for plan in plans] == [(8,), (8,), (3,)]
    assert [plan.samples for plan in plans] == [(False,), (False,), (True,)]
    assert [plan.max_committed for plan in plans] == [(0,), (8,), (16,)]


def test_a_decode_row_carries_the_drafts_of_the_plan_in_which_it_last_sampled() -> None:
    bench = Bench()
    bench.submit(request(1, max_tokens=20))
    drafts = [bench.step(policy).num_drafts for policy in (Fixed(3), Fixed(1), Off(), Fixed(0), Fixed(2), Off())]
    assert drafts == [(0,), (3,), (1,), (0,), (0,), (2,)]


@pytest.mark.parametrize("policy", [Off(), Fixed(0)])
def test_off_and_gamma_zero_leave_the_drafter_alone(policy: Policy) -> None:
    assert plan_speculation(policy, IDLE) == NO_SPECULATION
    assert not NO_SPECULATION.feed_drafter


def test_fixed_gamma_drafts_as_much_under_any_load() -> None:
    for load in (IDLE, Load(num_decoding=64, num_prefilling=3, num_waiting=900)):
        speculation = plan_speculation(Fixed(5), load)
        assert (speculation.gamma, speculation.verify_budget, speculation.feed_drafter) == (5, VERIFY_EVERYTHING, True)


def test_the_head_of_the_queue_is_not_passed_by() -> None:
    """12 pages: the first takes 6, the second needs 8 and waits, and the third, which would fit, waits behind it."""
    bench = Bench()
    bench.submit(request(1, num_prompt=9, max_tokens=10), request(2, num_prompt=17, max_tokens=10), request(3))
    plan = bench.step()
    assert [new.uid for new in plan.admitted] == [1]
    assert bench.scheduler.num_openings == 0
    for _ in range(10):  # a token of the first in each
        if 1 in bench.scheduler.ledger:
            assert [new.uid for new in bench.step().admitted] == []
    assert [new.uid for new in bench.step().admitted] == [2, 3]


def test_lower_priority_numbers_go_first_and_equals_by_arrival() -> None:
    bench = Bench(description=describe(num_slots=1))
    bench.submit(request(1), request(2, priority=1), request(3, priority=-1), request(4))
    bench.drain()
    assert bench.worker.admitted_uids == [3, 1, 4, 2]


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
    first = bench.step()
    second = bench.step()
    assert second.released_slots == first.slots
    assert [new.slot for new in second.admitted] == list(first.slots)
    assert second.epochs > first.epochs


def test_the_worker_hears_of_the_last_release_though_nothing_runs() -> None:
    bench = Bench()
    bench.submit(request(1, max_tokens=1))
    bench.step()
    assert bench.scheduler.has_work
    assert bench.step().slots == ()
    assert bench.worker.tenants == {}
    assert not bench.scheduler.has_work


def test_who_awaits_a_verdict_is_left_out() -> None:
    bench = Bench()
    bench.submit(request(1), request(2))
    bench.step()
    held = bench.scheduler.ledger[1]
    held.awaiting_verdict = True
    assert held.slot not in bench.step().slots
    held.awaiting_verdict = False
    assert held.slot in bench.step().slots


def test_margins_are_asked_for_while_a_sequence_that_reports_its_rounds_draws() -> None:
    bench = Bench(max_step_tokens=8)
    bench.submit(request(1, num_prompt=12, max_tokens=2, report_rounds=True), request(2, max_tokens=8))
    plans = [bench.step(Off()) for _ in range(4)]
    assert [plan.report_margins for plan in plans] == [False, True, True, False]
    assert [sum(plan.samples) for plan in plans] == [0, 2, 2, 1]


def test_decodes_that_found_no_room_go_first_in_the_next_step() -> None:
    """Three decodes of 5 rows in steps of 12 rows: two run at a time."""
    bench = Bench(max_step_tokens=12, accept=0.0)
    bench.submit(*(request(uid, max_tokens=8, num_prompt=1) for uid in range(1, 4)))
    bench.step(Fixed(4))
    served = [frozenset(bench.step(Fixed(4)).slots) for _ in range(6)]
    assert all(len(slots) == 2 for slots in served)
    assert all(first | second == {1, 2, 3} for first, second in itertools.pairwise(served))


def test_a_step_too_small_for_one_verify_pass_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_step_tokens is 5.*take 6"):
        Bench(max_step_tokens=5)


@given(
    decode_rows=st.lists(st.integers(1, 9), max_size=80),
    prompt_rows=st.lists(st.integers(1, 300), max_size=10),
    max_rows=st.integers(10, 512),
)
def test_shared_rows_fit_and_starve_nobody(decode_rows: list[int], prompt_rows: list[int], max_rows: int) -> None:
    shares = share_rows(decode_rows, prompt_rows, max_rows)
    used = sum(decode_rows[: shares.num_decodes]) + sum(shares.chunks)
    assert used <= max_rows
    assert all(1 <= chunk <= rows for chunk, rows in zip(shares.chunks, prompt_rows, strict=False))
    assert all(chunk == rows for chunk, rows in zip(shares.chunks[:-1], prompt_rows, strict=False))
    assert sum(shares.chunks) >= min(sum(prompt_rows), max_rows // 4, max_rows - max(decode_rows, default=0))
    assert shares.num_decodes >= min(1, len(decode_rows))
    if sum(decode_rows) + sum(prompt_rows) <= max_rows:
        assert (shares.num_decodes, list(shares.chunks)) == (len(decode_rows), prompt_rows)
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
    assert bench.worker.admitted_uids == sorted(bench.requests, key=lambda uid: (bench.requests[uid].priority, uid))
    assert len(bench.scheduler.ledger) == 0
    assert all(pool.num_used == 0 for pool in bench.scheduler.ledger.pages.values())
    assert bench.worker.tenants == {}
