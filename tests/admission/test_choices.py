"""What planning chooses: the best of all there is to choose from, within bounds, and no change for little."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from admission.cliffs import CliffCosts
from admission.hosts import planner
from hypothesis import given
from hypothesis import strategies as st

from runtime.verification.costs import CostCurve, Floats, Ints
from runtime.verification.planner import (
    HYSTERESIS,
    MIN_DWELL,
    Aim,
    Choice,
    Evidence,
    Outlook,
    choose,
    spend,
)
from runtime.verification.policy import Dynamic
from runtime.verification.speculation import Load, Traits
from workers.plan import VERIFY_EVERYTHING

GAMMA_MAX = 3
ANY_GAIN = Aim(min_gain=0.0)


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """base + row · rows + draft · γ."""

    base: float = 2.0
    row: float = 0.1
    draft: float = 0.1
    gamma_max: int = GAMMA_MAX
    tiers: tuple[int, ...] = ()

    def at(self, num_sequences: int, context: float, *, sampled: bool = True) -> CostCurve:
        return self  # type: ignore[return-value]

    def step_ms(self, rows: Ints, *, waiting: int, gamma: int) -> Floats:
        return self.base + self.row * rows + self.draft * gamma


def outlook(
    survivals: Sequence[Sequence[float]], *, caps: Sequence[int] = (), forced: Sequence[int] = (), prompts: int = 0
) -> Outlook:
    count = len(survivals)
    return Outlook(
        survival_EG=np.array(survivals, dtype=np.float64).reshape(count, GAMMA_MAX),
        caps_E=np.array(caps or [GAMMA_MAX] * count, dtype=np.int64),
        forced_E=np.array(forced or [0] * count, dtype=np.int64),
        share=1.0,
        num_prompt_rows=prompts,
    )


@st.composite
def outlooks(draw: st.DrawFn, *, most: int = 3) -> Outlook:
    """Survivals in sixteenths, which sum without rounding."""
    count = draw(st.integers(1, most))
    survivals = [sorted((draw(st.integers(0, 16)) / 16 for _ in range(GAMMA_MAX)), reverse=True) for _ in range(count)]
    caps = [draw(st.integers(0, GAMMA_MAX)) for _ in range(count)]
    forced = [draw(st.integers(0, min(1, cap))) for cap in caps]
    return outlook(survivals, caps=caps, forced=forced, prompts=draw(st.integers(0, 4)))


shares = st.integers(0, 32).map(lambda n: n / 64)
linear_costs = st.builds(LinearCosts, base=st.integers(1, 4).map(float), row=shares, draft=shares)


def drafts_of(look: Outlook, gamma: int) -> list[tuple[bool, float]]:
    """Of one rank, what budgets take first first: whether it is forced, and its survival."""
    found = [
        (j < look.forced_E[r], float(look.survival_EG[r, j]))
        for r, cap in enumerate(look.caps_E)
        for j in range(min(gamma, int(cap)))
    ]
    return sorted(found, reverse=True)


def all_ways(looks: Sequence[Outlook], costs: LinearCosts, gamma: int) -> list[tuple[float, float]]:
    """(tokens, ms) of every way to give each rank a budget of its own, from what is forced to what waits."""
    ways = []
    drafts = [drafts_of(look, gamma) for look in looks]
    for budgets in product(*(range(sum(forced for forced, _ in own), len(own) + 1) for own in drafts)):
        rows = max(look.num_rows + budget for look, budget in zip(looks, budgets, strict=True))
        tokens = sum(look.num_sequences for look in looks)
        tokens += sum(sum(a for _, a in own[:budget]) for own, budget in zip(drafts, budgets, strict=True))
        ways.append((tokens, costs.base + costs.row * rows + costs.draft * gamma))
    return ways


def evidence(looks: Sequence[Outlook], aim: Aim = ANY_GAIN) -> list[Evidence]:
    return [Evidence(look, aim.min_survival) for look in looks]


@given(st.lists(outlooks(most=2), min_size=1, max_size=2), linear_costs)
def test_the_steady_state_is_the_best_of_all_lengths_and_budgets(looks: list[Outlook], costs: LinearCosts) -> None:
    found = choose(evidence(looks), costs, ANY_GAIN, context=1.0, gammas=range(GAMMA_MAX + 1))
    prompt_ms = costs.row * (
        max(look.num_rows for look in looks) - max(look.num_rows - look.num_prompt_rows for look in looks)
    )
    rates = [
        max(tokens / (ms - prompt_ms) for tokens, ms in all_ways(looks, costs, gamma)) for gamma in range(GAMMA_MAX + 1)
    ]
    near = max(rates) / (1 + HYSTERESIS)
    best = next(rate for rate in rates if rate >= near * (1 - 1e-12))
    assert found.rate == pytest.approx(best, rel=1e-12)


@given(st.lists(outlooks(most=2), min_size=1, max_size=2), linear_costs, st.integers(1, 32))
def test_a_budget_brings_most_at_the_rate_of_the_steady_state(
    looks: list[Outlook], costs: LinearCosts, rate: int
) -> None:
    found = spend(evidence(looks), costs, ANY_GAIN, context=1.0, waiting=GAMMA_MAX, gamma=2, rate=rate / 16)
    worth = found.tokens - rate / 16 * found.step_ms
    best = max(tokens - rate / 16 * (ms + costs.draft * (2 - GAMMA_MAX)) for tokens, ms in all_ways(looks, costs, 3))
    assert worth == pytest.approx(best, abs=1e-9)


@given(st.lists(outlooks(), min_size=1, max_size=3), linear_costs, st.sampled_from([(), (4,), (3, 6, 9), (8, 16)]))
def test_budgets_lie_between_what_is_forced_and_what_waits_and_fill_tiers_up(
    looks: list[Outlook], costs: LinearCosts, tiers: tuple[int, ...]
) -> None:
    tiered = replace(costs, tiers=tiers)
    steady_state = choose(evidence(looks), tiered, ANY_GAIN, context=1.0, gammas=range(GAMMA_MAX + 1))
    present = spend(evidence(looks), tiered, ANY_GAIN, context=1.0, waiting=GAMMA_MAX, gamma=1, rate=0.7)
    for found, length in ((steady_state, steady_state.gamma), (present, GAMMA_MAX)):
        for look, budget in zip(looks, found.budgets, strict=True):
            drafts = drafts_of(look, length)
            num_forced = sum(forced for forced, _ in drafts)
            # As many as fit into the rows that the busiest rank makes all ranks pay for.
            assert budget == min(max(found.rows - look.num_rows, num_forced), len(drafts))
        if tiers and found.rows <= tiers[-1]:
            assert found.rows in tiers


@given(outlooks(), linear_costs, st.integers(2, 8))
def test_cheaper_rows_take_no_smaller_budget(look: Outlook, costs: LinearCosts, divisor: int) -> None:
    """At one rate of the steady state; and a cheaper draft is no shorter."""
    cheaper = replace(costs, row=costs.row / divisor)
    budgets = [
        spend(evidence([look]), some, ANY_GAIN, context=1.0, waiting=GAMMA_MAX, gamma=1, rate=0.9).budgets[0]
        for some in (costs, cheaper)
    ]
    assert budgets[0] <= budgets[1]
    lengths = [
        choose(evidence([look]), some, ANY_GAIN, context=1.0, gammas=range(GAMMA_MAX + 1)).gamma
        for some in (costs, replace(costs, draft=costs.draft / divisor))
    ]
    assert lengths[0] <= lengths[1]


@given(st.lists(outlooks(), min_size=2, max_size=4), linear_costs, st.randoms(use_true_random=False))
def test_data_parallel_ranks_have_one_answer_whatever_their_order(
    looks: list[Outlook], costs: LinearCosts, rng: random.Random
) -> None:
    order = list(range(len(looks)))
    rng.shuffle(order)
    moved = [looks[i] for i in order]
    here = choose(evidence(looks), costs, ANY_GAIN, context=1.0, gammas=range(GAMMA_MAX + 1))
    there = choose(evidence(moved), costs, ANY_GAIN, context=1.0, gammas=range(GAMMA_MAX + 1))
    assert there == replace(here, budgets=tuple(here.budgets[i] for i in order))


SURE = outlook([[1.0, 1.0, 1.0]] * 2)
HOPELESS = outlook([[0.0, 0.0, 0.0]] * 2)


def steady(look: Outlook, costs: LinearCosts, aim: Aim = ANY_GAIN, **how: object) -> Choice:
    return choose(evidence([look], aim), costs, aim, context=1.0, gammas=range(GAMMA_MAX + 1), **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [1, 50, 5000])
@given(
    looks=st.lists(outlooks(), min_size=1, max_size=1),
    costs=st.sampled_from([LinearCosts(row=1 / 8, draft=1 / 8), LinearCosts(row=1.0, draft=0.5)]),
)
def test_prompts_in_the_same_step_make_no_draft_worth_more(
    prompts: int, looks: list[Outlook], costs: LinearCosts
) -> None:
    """Where a row costs the same whatever lies beside it: their own time is theirs."""
    beside = [replace(look, num_prompt_rows=look.num_prompt_rows + prompts) for look in looks]
    alone, crowded = (
        choose([Evidence(look) for look in each], costs, Aim(), context=1.0, gammas=range(GAMMA_MAX + 1))
        for each in (looks, beside)
    )
    assert (alone.gamma, alone.budgets) == (crowded.gamma, crowded.budgets)
    assert crowded.step_ms > alone.step_ms
    assert crowded.rate == pytest.approx(alone.rate)


def test_a_row_that_is_dear_beside_prompts_counts_as_dear() -> None:
    look = outlook([[0.5, 0.25, 0.125]] * 2)
    cliff = CliffCosts(by_rows={1: 2.0, 2: 2.0, 60: 2.1, 61: 9.0}, draft_ms=0.0, gamma_max=GAMMA_MAX)
    beside = replace(look, num_prompt_rows=57)
    alone, crowded = (
        choose([Evidence(one)], cliff, Aim(), context=1.0, gammas=range(GAMMA_MAX + 1)) for one in (look, beside)
    )
    assert sum(alone.budgets) > 1 >= sum(crowded.budgets)


def test_ordinary_decoding_is_chosen_where_drafting_never_pays() -> None:
    assert steady(HOPELESS, LinearCosts()).gamma == 0
    assert steady(SURE, LinearCosts(row=3.0, draft=5.0)).gamma == 0
    assert steady(SURE, LinearCosts()).gamma == GAMMA_MAX


def test_a_gain_below_the_least_one_is_left() -> None:
    # Two sequences, one draft each that stands for sure: 4 tokens in 3.0 + 0.9 ms against 2 in 2.0.
    look = outlook([[1.0, 0.0, 0.0]] * 2)
    costs = LinearCosts(base=1.6, row=0.2, draft=1.4)
    gain = (4 / (1.6 + 0.8 + 1.4)) / (2 / 2.0) - 1
    assert 0.05 < gain < 0.06
    assert [steady(look, costs, Aim(min_gain=least)).gamma for least in (0.0, 0.05, 0.06)] == [1, 1, 0]


def test_another_length_needs_a_gain_of_its_own_and_time() -> None:
    costs = LinearCosts()
    best = steady(SURE, costs)
    assert best.gamma == GAMMA_MAX
    others = {gamma: replace(best, gamma=gamma) for gamma in range(GAMMA_MAX)}
    # γ 2 is worse by a tenth: kept while it is young, left after.
    assert steady(SURE, costs, previous=others[2], dwelt=MIN_DWELL - 1).gamma == 2
    assert steady(SURE, costs, previous=others[2], dwelt=MIN_DWELL).gamma == GAMMA_MAX
    # Lengths within the margin of each other stay, whichever is in use.
    flat = LinearCosts(base=0.001, row=1.0, draft=0.0001)
    rates = [
        choose(evidence([SURE]), flat, ANY_GAIN, context=1.0, gammas=range(gamma, gamma + 1)).rate for gamma in (1, 2)
    ]
    assert abs(rates[0] / rates[1] - 1) < HYSTERESIS
    for gamma in (1, 2):
        assert steady(SURE, flat, previous=replace(best, gamma=gamma), dwelt=100).gamma == gamma


def test_steps_keep_to_a_limit_while_one_can() -> None:
    costs = LinearCosts()
    free = steady(SURE, costs)
    assert free.step_ms > 2.9
    for limit in (2.9, 2.6, 2.3, 2.2):
        kept = steady(SURE, costs, Aim(min_gain=0.0, itl_limit_ms=limit))
        assert kept.step_ms <= limit
        assert kept.tokens < free.tokens
    # Nothing keeps to it: the shortest step there is.
    assert steady(SURE, costs, Aim(min_gain=0.0, itl_limit_ms=0.1)).step_ms == pytest.approx(2.2)
    spent = spend(evidence([SURE]), costs, Aim(itl_limit_ms=0.1), context=1.0, waiting=GAMMA_MAX, gamma=2, rate=9.0)
    assert spent.budgets == (0,)


def test_drafts_below_the_floor_count_for_nothing_but_forced_ones() -> None:
    look = outlook([[0.9, 0.5, 0.2], [0.4, 0.3, 0.2]], forced=[0, 1])
    free = LinearCosts(row=0.0, draft=0.0)
    found = steady(look, free, Aim(min_gain=0.0, min_survival=0.45))
    assert found.budgets == (3,)
    assert found.tokens == pytest.approx(2 + 0.9 + 0.5 + 0.4)


def test_rows_beyond_the_last_tier_are_counted_one_by_one() -> None:
    """A load above the largest tier is not bound to verify all that waits."""
    look = outlook([[0.9, 0.1, 0.0]] * 6)
    dear = LinearCosts(base=1.0, row=0.3, draft=0.0, tiers=(4,))
    rate = 2.0
    assert spend(evidence([look]), dear, ANY_GAIN, context=1.0, waiting=3, gamma=1, rate=rate).budgets == (6,)


@given(st.integers(0, 3), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3))
def test_what_a_plan_forces_fits_into_its_budget(gamma_min: int, left: list[int], waiting: int) -> None:
    """Also of sequences that end before they could use all that waits."""
    made = planner(
        CliffCosts(by_rows={1: 1.0, 2: 50.0}, gamma_max=GAMMA_MAX), Dynamic(min_gain=0.0, gamma_min=gamma_min)
    )
    count = len(left)
    made.history._drafted_at.update(dict.fromkeys(range(count), 1))
    load = Load(
        uids=tuple(range(count)),
        traits=(Traits(0, 4, None),) * count,
        waiting=(waiting,) * count,
        committed=(10,) * count,
        left=tuple(left),
    )
    (share,) = made.decide(2, [load]).batches
    assert all(0 < forced <= waiting for forced in share.forced.values())
    assert sum(share.forced.values()) <= min(share.verify_budget, count * waiting)
    assert share.verify_budget == VERIFY_EVERYTHING or share.verify_budget <= count * waiting
