"""Admission and hosts that are wrong on purpose, each in one of the ways that are easy to come by. Controls only.

Each looks at something that depends on a draft to decide whether that very draft is verified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations

from admission.worlds import Admission, Look, as_served
from draft.admission_laws import ONE, Lengths, RequestModel

from runtime.request import Request
from runtime.settlement import Outcome
from runtime.verification.speculation import BatchSpeculation, Load, Speculation
from workers.plan import StepPlan


@dataclass(slots=True)
class Told:
    """A host that has decided for good: γ, and the budget by step."""

    gamma: int
    budgets: Mapping[int, int]

    def decide(self, step_id: int, loads: Sequence[Load]) -> Speculation:
        share = BatchSpeculation(verify_budget=self.budgets.get(step_id, 0))
        return Speculation(gamma=self.gamma, feed_drafter=True, batches=(share,) * len(loads))

    def learn(self, plan: StepPlan, rounds: Sequence[tuple[Request, Outcome]], *, measured_s: float) -> None:
        pass

    def catch_up(self) -> None: ...


@dataclass(slots=True)
class Lagging:
    """A host that has its budget from the scores of the round before: 1 where the last draft of the only request seemed
    likely to stand, else 0. Causal, if the noise of drafts is fresh. gammas: by step."""

    gammas: Mapping[int, int]
    budget: int = 0

    def decide(self, step_id: int, loads: Sequence[Load]) -> Speculation:
        share = BatchSpeculation(verify_budget=self.budget)
        return Speculation(gamma=self.gammas[step_id], feed_drafter=True, batches=(share,))

    def learn(self, plan: StepPlan, rounds: Sequence[tuple[Request, Outcome]], *, measured_s: float) -> None:
        ((_, outcome),) = rounds
        self.budget = int(bool(outcome.scores) and outcome.scores[-1] > 0)

    def catch_up(self) -> None: ...


def survivals(look: Look) -> dict[tuple[int, int], float]:
    """By row and position, without clip and minimum."""
    return {(r, j): math.prod(row[: j + 1]) for r, row in enumerate(look.confidences) for j in range(len(row))}


def top(look: Look, budget: int) -> list[tuple[Fraction, Lengths]]:
    return as_served(replace(look, budget=budget))


def best_of_the_present(costs: Mapping[int, float]) -> Admission:
    """The budget of the best ratio of tokens to cost under the confidences of the drafts that wait."""

    def rule(look: Look) -> list[tuple[Fraction, Lengths]]:
        falling = sorted(survivals(look).values(), reverse=True)
        count = len(look.uids)
        rates = [(count + sum(falling[:budget])) / costs[count + budget] for budget in range(len(falling) + 1)]
        return top(look, rates.index(max(rates)))

    return rule


def fitted_to(tiers: Sequence[int], *, up: bool) -> Admission:
    """Drafts of survival 1/2 and more, then as many of them as make the rows one of the tiers."""

    def rule(look: Look) -> list[tuple[Fraction, Lengths]]:
        rows = len(look.uids) + sum(survival >= 0.5 for survival in survivals(look).values())
        tier = min(t for t in tiers if t >= rows) if up else max(t for t in tiers if t <= rows)
        return top(look, tier - len(look.uids))

    return rule


def by_lot(look: Look) -> list[tuple[Fraction, Lengths]]:
    """The largest survivals; equals in an order by lot."""
    survival = survivals(look)
    orders = list(permutations(survival))
    chosen = [sorted(order, key=lambda entry: -survival[entry])[: look.budget] for order in orders]
    return [(Fraction(1, len(orders)), _counted(look, entries)) for entries in chosen]


def later_slots_first(look: Look) -> list[tuple[Fraction, Lengths]]:
    """The largest survivals; of equals the one further back in its draft."""
    survival = survivals(look)
    order = sorted(survival, key=lambda entry: (-survival[entry], -entry[1], entry[0]))
    return [(ONE, _counted(look, order[: look.budget]))]


def unclipped(look: Look) -> list[tuple[Fraction, Lengths]]:
    """The largest survivals, where a factor above 1 may let a later draft outrank the one before it."""
    survival = survivals(look)
    order = sorted(survival, key=lambda entry: (-survival[entry], entry[1], entry[0]))
    return [(ONE, _counted(look, order[: look.budget]))]


def batch_stops(threshold: float) -> Admission:
    """Another draft of the whole batch is drawn only if its survivals sum to the threshold: those now, which know the
    drafts before. The budget then goes to the best of what there is."""

    def rule(look: Look) -> list[tuple[Fraction, Lengths]]:
        survival = survivals(look)
        width = 1
        while width < max(look.num_drafts) and sum(a for (_, j), a in survival.items() if j == width) >= threshold:
            width += 1
        return as_served(
            replace(
                look,
                drafts=tuple(x[:width] for x in look.drafts),
                confidences=tuple(row[:width] for row in look.confidences),
            )
        )

    return rule


def preempting(num_free: int) -> Admission:
    """Drafts of survival 1/2 and more; a request that then lacks room is put off and verifies none."""

    def rule(look: Look) -> list[tuple[Fraction, Lengths]]:
        survival = survivals(look)
        wanted = [sum(survival[r, j] >= 0.5 for j in range(count)) for r, count in enumerate(look.num_drafts)]
        return [(ONE, tuple(count if count <= num_free else 0 for count in wanted))]

    return rule


def own_threshold(models: Sequence[RequestModel], least: Fraction) -> Admission:
    """A draft is verified while the drafter gave the very token that it drew at least this much."""

    def rule(look: Look) -> list[tuple[Fraction, Lengths]]:
        lengths = []
        for uid, prefix, drafts in zip(look.uids, look.prefixes, look.drafts, strict=True):
            shares = [models[uid - 1].q((*prefix, *drafts[:j]))[token] for j, token in enumerate(drafts)]
            lengths.append(next((j for j, share in enumerate(shares) if share < least), len(drafts)))
        return [(ONE, tuple(lengths))]

    return rule


def threshold_before_the_draw(models: Sequence[RequestModel], least: Fraction) -> Admission:
    """As `own_threshold`, by the largest share of the law instead of that of the token drawn: exact."""

    def rule(look: Look) -> list[tuple[Fraction, Lengths]]:
        lengths = []
        for uid, prefix, drafts in zip(look.uids, look.prefixes, look.drafts, strict=True):
            shares = [max(models[uid - 1].q((*prefix, *drafts[:j]))) for j in range(len(drafts))]
            lengths.append(next((j for j, share in enumerate(shares) if share < least), len(drafts)))
        return [(ONE, tuple(lengths))]

    return rule


def told(gamma: int, budgets: Mapping[int, int]) -> Callable[[], Told]:
    return lambda: Told(gamma, budgets)


def _counted(look: Look, entries: Sequence[tuple[int, int]]) -> Lengths:
    return tuple(sum(row == r for row, _ in entries) for r in range(len(look.uids)))
