"""Two requests over two and three rounds under the planner that serves: the joint law of their outputs is the target's.

Equality of fractions, with the planner, `admit`, `verify`, `draw_draft` and the keys of noise as they serve; see
`admission.worlds`. Costs are full of cliffs, and are changed until what a first round brought changes what the planner
decides of a later one: where nothing depends on the past there is nothing to prove.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
from admission.cliffs import CliffCosts, first, mirrored, overlap, steady
from admission.hosts import planner, planners
from admission.worlds import World
from draft.admission_laws import Masses, RequestModel, Tokens
from oracles.days import by_day

from runtime.verification.policy import Dynamic
from runtime.verification.policy_planner import PolicyPlanner
from workers.plan import StepPlan

TRIES = 12
"""Costs that are tried where those named do not make decisions differ between branches; about every third one does."""

TWO_ROUNDS, THREE_ROUNDS = (101, 201, 301), (101, 201, 301, 401)
"""Step ids so far apart that the calibration is fitted and draft lengths are chosen anew in each."""

ANY_GAIN = Dynamic(min_gain=0.0)
UNDER_A_LIMIT = Dynamic(min_gain=0.0, itl_limit_ms=2.8)


@dataclass(frozen=True, slots=True)
class Family:
    """Worlds that differ in their costs; seed: of costs under which decisions depend on the past."""

    make: Callable[[int], World]
    seed: int


def random_costs(seed: int, *, gamma_max: int = 2, num_sequences: int = 2, tiers: Sequence[int] = ()) -> CliffCosts:
    """Rows that cost nothing beside rows that cost more than half a pass."""
    rng = random.Random(seed)
    by_rows = {num_sequences: 2.0}
    for rows in range(num_sequences + 1, num_sequences * (gamma_max + 1) + 1):
        by_rows[rows] = by_rows[rows - 1] + rng.choice((0, 0.02, 0.05, 0.1, 0.3, 0.6, 0.9, 1.2))
    return CliffCosts(by_rows=by_rows, draft_ms=rng.choice((0, 0.02, 0.05)), gamma_max=gamma_max, tiers=tuple(tiers))


def two(seed: int, *, policy: Dynamic = ANY_GAIN, tiers: Sequence[int] = (), **of: Any) -> World:
    gamma_max = of.get("gamma_max", 2)
    num_sequences = 1 if len(set(of.get("homes", (0, 0)))) > 1 else len(of.get("models", "AB"))
    costs = random_costs(seed, gamma_max=gamma_max, num_sequences=num_sequences, tiers=tiers)
    whole: dict[str, Any] = {
        "models": [first(1), mirrored(1)],
        "host": planners(costs, policy),
        "max_tokens": 6,
        "step_ids": TWO_ROUNDS,
    }
    return World(**whole | of)


def three_tokens(x: Tokens) -> Masses:
    half, quarter = Fraction(1, 2), Fraction(1, 4)
    return {0: (half, quarter, quarter), 1: (quarter, half, quarter), 2: (Fraction(0), half, half)}[x[-1] if x else 0]


def of_three_tokens() -> RequestModel:
    """Two laws of three tokens that know the token before; the drafter's is the target's of another one."""
    sure = (Fraction(1), Fraction(0), Fraction(0))
    return overlap(
        lambda x: three_tokens(x) if x else sure, lambda x: three_tokens((*x[:-1], (x[-1] + 1) % 3)) if x else sure
    )


def slow_after_1(plan: StepPlan, drawn: Sequence[Tokens]) -> float:
    """Steps whose first request has drawn a 1 take fifty times as long."""
    return 0.016 if drawn[0] and drawn[0][0] == 1 else 0.0003


def mirrored_of_three() -> RequestModel:
    """The same with a drafter that is never wrong."""
    same = of_three_tokens()
    return overlap(same.p, same.p)


FAMILIES: dict[str, Family] = {
    "two_rounds": Family(two, 9),
    "three_rounds": Family(lambda seed: two(seed, gamma_max=1, max_tokens=5, step_ids=THREE_ROUNDS), 1),
    "uneven_requests": Family(lambda seed: two(seed, models=[first(1), steady("1/2", "1/3", lead=1)]), 30),
    "floor": Family(lambda seed: two(seed, policy=Dynamic(min_gain=0.0, min_survival=0.4)), 1),
    "forced": Family(lambda seed: two(seed, policy=Dynamic(min_gain=0.0, gamma_min=1)), 25),
    "tiers": Family(lambda seed: two(seed, tiers=(3, 5, 6)), 14),
    "time_limit": Family(lambda seed: two(seed, policy=UNDER_A_LIMIT), 13),
    "two_data_parallel_ranks": Family(lambda seed: two(seed, homes=(0, 1), max_tokens=8), 77),
    "time_tells_of_drafts": Family(lambda seed: two(seed, policy=UNDER_A_LIMIT, seconds=slow_after_1), 13),
    "three_drafts": Family(lambda seed: two(seed, models=[first(1)], gamma_max=3, max_tokens=8), 1),
}

WIDE: dict[str, Family] = {
    "three_rounds_of_two": Family(lambda seed: two(seed, step_ids=THREE_ROUNDS), 1),
    "three_tokens": Family(
        lambda seed: two(seed, models=[of_three_tokens(), mirrored_of_three()], vocab_size=3, max_tokens=5), 2
    ),
    "two_rounds_of_three": Family(lambda seed: two(seed, gamma_max=3), 6),
}


def check(family: Family) -> None:
    for seed in (family.seed, *range(TRIES)):
        there = family.make(seed)
        assert there.bias() == 0, seed
        if depends_on_the_past(there):
            return
    pytest.fail(f"inconclusive: under none of {TRIES} costs did a decision that counts depend on the past")


def depends_on_the_past(world: World) -> bool:
    """Whether branches differ in a budget, or in a draft length of which drafts are verified later; and in what was
    admitted."""
    watch = world.watch
    decided: list[Collection[object]] = [*watch.budgets.values(), *(watch.gammas[i] for i in world.step_ids[:-1])]
    return any(len(found) > 1 for found in decided) and any(len(found) > 1 for found in watch.lengths.values())


@pytest.mark.parametrize("family", by_day(FAMILIES, 3))
def test_the_joint_law_is_the_targets(family: Family) -> None:
    check(family)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", WIDE.values(), ids=WIDE)
def test_the_joint_law_of_wide_worlds_is_the_targets(family: Family) -> None:
    check(family)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_joint_law_is_the_targets_under_40_costs(family: Family) -> None:
    for seed in range(40):
        assert family.make(seed).bias() == 0, seed


class Hasty(PolicyPlanner):
    """Learns from a step's time at once."""

    def catch_up(self) -> None:
        super().catch_up()
        self._residuals.learn(before=1 << 60)


def test_the_time_of_a_step_is_rejected_while_the_drafts_it_drew_wait() -> None:
    """How long drawing took tells what was drawn, where experts differ in their load. Under a limit on steps it would
    decide whether those drafts are verified."""

    def hasty() -> Hasty:
        made = planner(random_costs(8), UNDER_A_LIMIT)
        made.__class__ = Hasty
        return made  # type: ignore[return-value]

    assert two(8, host=hasty, seconds=slow_after_1).bias() > Fraction(1, 25)
    assert two(8, policy=UNDER_A_LIMIT, seconds=slow_after_1).bias() == 0
