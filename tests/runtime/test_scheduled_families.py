"""Families on the scheduler: room for all at once, one reads the prompt, the others fork, and each ends by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes.requests import request
from fakes.scheduler_bench import Bench
from fakes.worker import describe
from hypothesis import given
from hypothesis import strategies as st

from runtime.scheduler.queue import WaitingQueue
from runtime.verification.policy import Fixed, Off
from runtime.verification.speculation import Load, Speculation
from workers.plan import BatchPlan

ROOMY = describe(num_pages=(60, 60), num_slots=8, max_model_len=80)


def entered(plan: BatchPlan) -> list[tuple[int, int | None]]:
    """Who enters, and the slot that it forks from."""
    return [(new.uid, None if new.fork is None else new.fork.slot) for new in plan.admitted]


def test_the_first_reads_all_but_the_last_token_and_then_all_draw_from_it() -> None:
    bench = Bench(max_step_tokens=8, description=ROOMY)
    bench.submit(request(1, num_prompt=19, max_tokens=4, n=3))
    plans = [bench.batch(Off()) for _ in range(4)]
    slot = plans[0].slots[0]
    assert [entered(plan) for plan in plans] == [[(1, None)], [], [], [(2, slot), (3, slot)]]
    assert [plan.num_known for plan in plans] == [(8,), (8,), (2,), (1, 1, 1)]
    assert [plan.samples for plan in plans] == [(False,), (False,), (False,), (True, True, True)]
    assert plans[3].max_committed == (18, 18, 18)
    assert plans[3].slots[0] == slot, "the first is in the very step in which the others fork from it"
    assert plans[3].num_unfed == (18,) * 3, "nobody's drafter has seen the prompt"
    bench.drain()
    bench.check_baseline()


@pytest.mark.parametrize(("num_prompt", "num_steps"), [(1, 1), (2, 2)])
def test_the_shortest_prompts(num_prompt: int, num_steps: int) -> None:
    bench = Bench(description=ROOMY)
    bench.submit(request(1, num_prompt=num_prompt, max_tokens=2, n=4))
    plans = [bench.batch() for _ in range(num_steps)]
    assert plans[-1].samples == (True,) * 4
    forked = [new for plan in plans for new in plan.admitted if new.fork is not None]
    assert len(forked) == (0 if num_prompt == 1 else 3)
    bench.drain()
    bench.check_baseline()


def test_pages_of_the_prompt_are_held_once() -> None:
    """Of 17 + 4 + 5 tokens in pages of 4, the first 4 pages are everybody's."""
    bench = Bench(description=ROOMY)
    bench.submit(request(1, num_prompt=17, max_tokens=4, n=5))
    bench.step()
    use = bench.one.use()
    assert [pool.used for pool in use.pages] == [7 + 4 * 3] * 2
    assert (use.running, use.slots_used) == (5, 5)
    bench.step()
    assert [pool.used for pool in bench.one.use().pages] == [7 + 4 * 3] * 2
    bench.drain()
    bench.check_baseline()


def test_a_family_waits_for_room_for_all_of_it_and_nobody_passes_it_by() -> None:
    bench = Bench(description=describe(num_pages=(20, 20)))
    bench.submit(request(1, max_tokens=3), request(2, max_tokens=12), request(10, max_tokens=4, n=3), request(20))
    assert [uid for uid, _ in entered(bench.batch())] == [1, 2]
    assert (len(bench.queue), bench.scheduler.num_openings) == (4, 0)
    while 1 in bench.one.ledger:
        assert entered(bench.batch()) == []
    assert entered(bench.batch()) == [(10, None)], "and three slots are taken with it"
    assert len(bench.queue) == 1
    bench.drain()
    bench.check_baseline()


def test_a_family_keeps_its_place_while_it_forks() -> None:
    """A long prompt that came later leaves the rows of the last tokens to those who came before."""
    bench = Bench(max_step_tokens=8, description=ROOMY)
    bench.submit(request(1, num_prompt=12, max_tokens=3, n=3), request(9, num_prompt=40, max_tokens=1))
    plans = [bench.batch(Off()) for _ in range(3)]
    assert plans[2].num_known == (1, 1, 1, 5)


def test_a_family_goes_to_one_rank_and_its_prompt_weighs_once() -> None:
    """Outstanding: 20 + 2 · (20 − 9) = 42 tokens on rank 0, so that 40 more fit on rank 1 before it has more."""
    bench = Bench(dp=2, description=ROOMY)
    bench.submit(request(1, num_prompt=10, max_tokens=5, n=3), request(9, num_prompt=10, max_tokens=26))
    first, second = bench.step().batches
    assert [new.uid for new in first.admitted] == [1]
    assert [new.uid for new in second.admitted] == [9]
    assert [scheduler.num_outstanding_tokens for scheduler in bench.scheduler.schedulers] == [42 - 9, 41 - 10]
    bench.submit(request(11, num_prompt=3, max_tokens=3))
    bench.step()
    assert bench.home_of(11) == 1
    assert {bench.home_of(uid) for uid in (1, 2, 3)} == {0}
    bench.drain()
    bench.check_baseline()


def test_a_first_that_waits_with_its_last_token_ends_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(description=ROOMY)
    bench.submit(request(1, num_prompt=6, n=2))
    loads: list[Load] = []
    decide = bench.told.planner.decide

    def note(step_id: int, ranks: Sequence[Load]) -> Speculation:
        loads.extend(ranks)
        return decide(step_id, ranks)

    monkeypatch.setattr(bench.told.planner, "decide", note)
    bench.step()
    bench.step()
    assert [(load.entering, load.num_prompt_rows) for load in loads] == [((), 5), ((1, 2), 2)]


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("ended", [(1,), (2,), (3,), (1, 2), (2, 1), (1, 3), (1, 2, 3), (3, 2, 1)])
def test_members_end_in_any_order_at_any_time_and_the_others_go_on(steps: int, ended: tuple[int, ...]) -> None:
    """Read in steps 1 and 2, forked in step 3. The fake ranks check that whoever takes a place keeps its state."""
    bench = Bench(max_step_tokens=8, description=ROOMY)
    bench.submit(request(1, num_prompt=12, max_tokens=6, n=3), request(7, num_prompt=3, max_tokens=8))
    bench.step()
    for _ in range(steps):
        bench.step()
    for uid in ended:
        bench.scheduler.release(uid)
        assert bench.scheduler.check_integrity() == []
    left = {1, 2, 3, 7} - set(ended)
    assert {sequence.uid for sequence in bench.scheduler.running} == left
    bench.drain()
    bench.check_baseline()
    # Whoever is left has all its tokens: `Bench.step` holds them against the true ones.
    chunks = [known for plan in bench.group.plans for known in plan.batches[0].num_known if known > 1]
    assert sum(chunks) <= 12 + 3, "the prompt was read once"


def test_who_takes_a_place_is_told_of_before_anything_else_of_it_runs() -> None:
    bench = Bench(max_step_tokens=8, description=ROOMY)
    bench.submit(request(1, num_prompt=12, n=3))
    slot = bench.batch().slots[0]
    bench.scheduler.release(1)
    plan = bench.batch()
    assert (entered(plan), plan.slots, plan.released_slots) == ([(2, slot)], (slot,), ())
    plan = bench.batch()
    assert entered(plan) == [(3, slot)]
    # And one that has taken a place ends before the ranks have heard of it.
    bench = Bench(max_step_tokens=8, description=ROOMY)
    bench.submit(request(1, num_prompt=12, n=3))
    slot = bench.batch().slots[0]
    bench.scheduler.release(1)
    bench.scheduler.release(2)
    assert bench.scheduler.followers(3) == []
    assert (entered(plan := bench.batch()), plan.num_known) == ([(3, slot)], (4,)), "alone, it reads to the end"
    bench.scheduler.release(3)
    assert bench.batch().released_slots == (slot,)
    bench.check_baseline()


def test_slots_of_those_that_never_entered_are_not_released_on_the_rank() -> None:
    bench = Bench(max_step_tokens=8, description=ROOMY)
    bench.submit(request(1, num_prompt=12, n=3))
    bench.step()
    bench.scheduler.release(3)
    assert bench.batch().released_slots == ()
    bench.submit(request(9))
    bench.drain()
    bench.check_baseline()


def test_members_leave_the_queue_one_by_one() -> None:
    queue = WaitingQueue()
    queue.push(request(1, n=3))
    queue.push(request(4, priority=-1))
    assert [each.uid for each in queue] == [4, 1, 2, 3]
    assert len(queue) == 4
    assert queue.remove(1).index == 0
    assert (queue.remove(3).uid, len(queue), 3 in queue) == (3, 2, False)
    assert queue.pop()[0].uid == 4
    assert [(each.uid, each.index, each.n) for each in queue.head or ()] == [(2, 1, 3)]
    queue.remove(2)
    assert (queue.head, len(queue), list(queue)) == (None, 0, [])


def test_a_family_whose_first_has_left_the_queue_goes_on_with_the_second() -> None:
    bench = Bench(description=ROOMY)
    bench.submit(request(1, num_prompt=6, n=3))
    bench.queue.remove(1)
    assert entered(bench.batch()) == [(2, None)]
    assert [uid for uid, _ in entered(bench.batch())] == [3]
    bench.drain()
    bench.check_baseline()


@given(
    dp=st.integers(1, 2),
    shapes=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(1, 4), st.integers(0, 1)), min_size=1, max_size=8
    ),
    gammas=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    max_step_tokens=st.integers(6, 40),
    ends=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), max_size=12),
)
def test_whatever_ends_when_all_others_get_their_tokens_and_pools_return(
    dp: int,
    shapes: list[tuple[int, int, int, int]],
    gammas: list[int],
    max_step_tokens: int,
    ends: list[tuple[int, int]],
) -> None:
    """ends: (step, which of those that live then)."""
    bench = Bench(dp=dp, max_step_tokens=max_step_tokens, description=ROOMY)
    uid = 1
    for num_prompt, max_tokens, n, priority in shapes:
        bench.submit(request(uid, num_prompt=num_prompt, max_tokens=max_tokens, n=n, priority=priority))
        uid += n
    for number in range(400):
        for _, which in [end for end in ends if end[0] == number]:
            live = [each.uid for each in bench.queue] + [each.uid for each in bench.scheduler.running]
            if live:
                chosen = live[which % len(live)]
                (bench.queue.remove if chosen in bench.queue else bench.scheduler.release)(chosen)
                assert bench.scheduler.check_integrity() == []
        if not bench.scheduler.has_work:
            break
        gamma = gammas[number % len(gammas)]
        bench.step(Fixed(gamma) if gamma else Off())
    assert not bench.scheduler.has_work
    bench.check_baseline()
