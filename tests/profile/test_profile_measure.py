"""Measuring through the scheduler and the books: which steps, on what loads, and what is left of it all."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from fakes.worker import FakeGroup, describe

from configs.schema import ClusterSettings, SchedulerSettings, ServeSettings
from runtime.life import begin_life
from runtime.profile.document import Profile
from runtime.profile.drive import ProfileError, SyntheticLoad
from runtime.profile.grid import QUICK, THOROUGH, sweeps
from runtime.profile.identity import identity_of
from runtime.profile.measure import measure
from runtime.scheduler.queue import WaitingQueue
from workers.plan import WorkerLost

NOW = datetime(2030, 5, 1, 12, tzinfo=UTC)
STEP_TOKENS = 40
SETTINGS = ServeSettings(scheduler=SchedulerSettings(max_step_tokens=STEP_TOKENS))
ROOMY = describe(num_pages=(400, 400), max_model_len=200, context_length=200, num_slots=6)


def group_of(dp: int = 1, **options) -> FakeGroup:
    return FakeGroup(options.pop("description", ROOMY), dp=dp, max_step_tokens=STEP_TOKENS, **options)


def measured(group: FakeGroup, progress=lambda done, total, text: None, *, quick: bool = True):
    async def work() -> tuple[Profile, SyntheticLoad]:
        load = SyntheticLoad(group, SETTINGS)
        return await measure(load, SETTINGS, progress, quick=quick, now=lambda: NOW), load

    return asyncio.run(work())


def test_every_cell_is_of_steps_that_were_run():
    group = group_of()
    profile, _ = measured(group)
    assert group.violations == []
    # Waiting drafts, rows and drafts drawn of all steps in which everybody decoded.
    seen = {
        (len(batch.slots), batch.num_drafts[0], sum(batch.num_known) + min(sum(batch.num_drafts), batch.verify_budget))
        for plan in group.plans
        for batch in plan.batches
        if batch.slots and set(batch.num_known) == {1} and len(set(batch.num_drafts)) == 1
        if plan.gamma == batch.num_drafts[0]
    }
    cells = {(cell.num_sequences, cell.waiting, cell.rows) for cell in profile.cells}
    assert cells <= seen
    assert {cell.num_sequences for cell in profile.cells} == {1, 4, 6}
    assert {cell.gamma for cell in profile.cells if cell.sampled} == {0, 1, 3, 4}
    assert all(cell.waiting == cell.gamma and cell.rows <= STEP_TOKENS for cell in profile.cells)
    assert all(cell.step.n == QUICK.repeats for cell in profile.cells)
    # Without drafts the drafter rests, but for prompts, which it is to have seen.
    assert not any(
        plan.feed_drafter for plan in group.plans if not plan.gamma and set(plan.batches[0].num_known) == {1}
    )
    assert all(plan.feed_drafter for plan in group.plans if max(plan.batches[0].num_known, default=0) > 1)


def test_parts_are_the_slowest_ranks():
    group = group_of(dp=2)
    profile, _ = measured(group)
    # The fake's rank 1 takes twice as long as its rank 0.
    assert {(cell.target.median, cell.draft.median, cell.draft.iqr) for cell in profile.cells} == {(1000, 250, 0)}
    assert {(cell.dispatch.median, cell.combine.median) for cell in profile.cells} == {(62.5, 31.25)}
    assert profile.imbalance is not None
    assert profile.imbalance.p50 == 1
    assert profile.identity.dp == 2
    assert profile.identity.machines == ("", "")


def test_sequences_are_on_all_data_parallel_ranks_alike():
    group = group_of(dp=2)
    measured(group)
    sizes = [[len(batch.slots) for batch in plan.batches] for plan in group.plans if plan.gamma]
    assert sizes
    assert all(one == other for one, other in sizes)


def test_contexts_hold_still_and_are_told():
    profile, _ = measured(group_of())
    contexts = sorted({(cell.num_sequences, cell.context) for cell in profile.cells})
    assert all(64 <= context <= 64 + 128 for _, context in contexts)
    longer = describe(num_pages=(400, 400), max_model_len=1200, context_length=1200, num_slots=2)
    profile, _ = measured(group_of(description=longer))
    long = [cell for cell in profile.cells if cell.context > 500]
    assert {(cell.num_sequences, cell.waiting, cell.sampled) for cell in long} == {
        (load, waiting, True) for load in (1, 2) for waiting in (0, 4)
    }


def test_nothing_is_left_on_the_ranks_and_the_next_life_goes_on():
    group = group_of(dp=2)
    _, load = measured(group)
    assert load.check_integrity() == []
    assert group.tenants == []
    last = group.plans[-1]
    life = begin_life(group, WaitingQueue(), SETTINGS, load.life, now_s=0)
    assert life.scheduler.next_step_id == last.step_id + 1
    entered = max(new.epoch for plan in group.plans for batch in plan.batches for new in batch.admitted)
    assert all(scheduler.ledger.slots.next_epoch > entered for scheduler in life.scheduler.schedulers)


def test_the_cells_of_a_load_take_turns():
    group = group_of()
    measured(group)
    waits = [max(plan.batches[0].num_drafts, default=0) for plan in group.plans if plan.samples]
    switches = sum(before != after for before, after in pairwise(waits))
    # Per round of each load the sampled go through 0, 1, 3 and 4 drafts, the greedy through 0, 1 and 4.
    assert switches >= 3 * (QUICK.warmup + QUICK.repeats) * (3 + 2)
    # Each round begins at the next: 0 1 3 4, then 1 3 4 0.
    assert (4, 1) in set(pairwise(waits))


def test_progress_counts_up_to_all():
    told: list[tuple[int, int, str]] = []
    measured(group_of(), lambda *step: told.append(step))
    done = [step[0] for step in told]
    assert done == sorted(done)
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1] > 0
    assert {step[2] for step in told} >= {"1 sequence, sampled, context 64", "6 sequences, greedy, context 64"}


def test_measuring_says_when_where_and_how():
    alone = describe(num_pages=(400, 400), max_model_len=200, num_slots=1)
    profile, _ = measured(group_of(description=alone), quick=False)
    assert profile.created == NOW
    assert (profile.method.warmup, profile.method.repeats) == (THOROUGH.warmup, THOROUGH.repeats)
    assert profile.identity.max_step_tokens == STEP_TOKENS
    assert profile.identity.collectives == "none"
    assert profile.tiers == ()
    assert {cell.gamma for cell in profile.cells} == {0, 1, 2, 3, 4}


def test_rows_that_are_padded_make_tiers():
    profile, _ = measured(group_of(description=describe(row_multiple=16, num_pages=(400, 400), max_model_len=200)))
    assert profile.tiers == (16, 32, 48)


def test_too_little_memory_is_said_in_the_settings_words():
    with pytest.raises(ProfileError, match=r"cache\.memory_mib"):
        measured(group_of(description=describe(num_pages=(5, 5), max_model_len=200)))


def test_a_lost_rank_ends_it():
    group = group_of()

    def lose(done: int, total: int, text: str) -> None:
        if done > 20:
            group.lose(WorkerLost("rank 0 died"))

    with pytest.raises(WorkerLost, match="rank 0 died"):
        measured(group, lose)


@pytest.mark.parametrize("pages", [40, 100, 1000])
@pytest.mark.parametrize("longest", [40, 90, 600, 5000])
@pytest.mark.parametrize("gamma_max", [0, 1, 8])
def test_what_is_planned_fits(pages, longest, gamma_max):
    one = describe(num_pages=(pages, pages + 3), page_size=16, max_model_len=longest, gamma_max=gamma_max, num_slots=20)
    try:
        planned = list(sweeps(one, max_step_tokens=64, pace=THOROUGH))
    except ValueError:
        assert longest < 2 * (4 + 7 * (1 + gamma_max)) or pages * 16 < 100
        return
    for sweep in planned:
        tokens = sweep.context + sweep.max_tokens
        assert tokens <= longest
        assert sweep.num_sequences * -(-(tokens + gamma_max + 1) // 16) <= pages
        assert all(0 <= budget <= 64 - sweep.num_sequences for visit in sweep.visits for budget in visit.budgets)
        assert sweep.visits[-1].waiting == gamma_max
    loads = {sweep.num_sequences for sweep in planned}
    assert 1 in loads
    assert all(load & (load - 1) == 0 or load == max(loads) for load in loads)


def test_long_contexts_are_read_by_few():
    one = describe(num_pages=(10_000,) * 2, page_size=16, max_model_len=40_000, gamma_max=8, num_slots=64)
    long = [sweep for sweep in sweeps(one, max_step_tokens=512, pace=THOROUGH) if sweep.context > 64]
    assert {sweep.context for sweep in long} == {4992, 19971}
    assert sorted(sweep.num_sequences for sweep in long) == [1, 1, 2]
    assert all(sweep.sampled and [visit.waiting for visit in sweep.visits] == [0, 8] for sweep in long)


def test_the_identity_is_what_the_ranks_say():
    ranks = {
        "dtype": "bfloat16", "numerics": "default", "model_type": "m", "checkpoint": "c", "device": "cuda:3",
        "machine": "big", "torch_version": "9", "page_size": 7, "gamma_max": 5,
    }  # fmt: skip
    group = group_of(dp=2, description=describe(**ranks))
    settings = ServeSettings(cluster=ClusterSettings(worker_threads=3), scheduler=SchedulerSettings(max_step_tokens=77))
    found = identity_of(settings, group.mesh, group.ranks).model_dump(exclude={"outrider_version", "collectives"})
    assert found == {name: value for name, value in ranks.items() if name not in ("device", "machine")} | {
        "devices": ("cuda", "cuda"), "machines": ("big", "big"), "dp": 2, "tp": 1, "ep": 2, "worker_threads": 3,
        "max_step_tokens": 77,
    }  # fmt: skip


def test_collectives_are_named_by_what_carries_them():
    def carrier(device: str, **cluster) -> str:
        group = group_of(dp=2, description=describe(device=device))
        settings = ServeSettings(cluster=ClusterSettings(**cluster))
        return identity_of(settings, group.mesh, group.ranks).collectives

    assert carrier("cpu") == carrier("cpu", collectives="gloo") == carrier("cuda:0", collectives="gloo") == "gloo"
    assert carrier("cuda:0") == carrier("cuda:0", collectives="nccl") == "nccl"
