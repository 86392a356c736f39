"""Requests and step costs made for admission to go wrong on: what follows a draft decides whether a cliff is worth it.

Sources: the instances of which the exact bias under wrong rules is known. Knows no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from draft.admission_laws import Masses, RequestModel, Tokens, coin

from runtime.verification.costs import CostCurve, Floats, Ints


def overlap(p: Callable[[Tokens], Masses], q: Callable[[Tokens], Masses]) -> RequestModel:
    """A request whose confidence is the very probability that the next draft stands."""
    return RequestModel(p=p, q=q, confidence=lambda x: float(sum(map(min, p(x), q(x)))))


def cliff(p: str, q: str, next_p: tuple[str, str], next_q: tuple[str, str], *, lead: int = 0) -> RequestModel:
    """First laws p and q; after token x the laws next_p[x] and next_q[x]; then first laws again, in turn. Shares of
    token 0. lead: tokens before all that, which are 0 for sure."""

    def target(x: Tokens) -> Masses:
        if len(x) < lead:
            return coin("1")
        return coin(next_p[x[-1]]) if (len(x) - lead) % 2 else coin(p)

    def drafter(x: Tokens) -> Masses:
        if len(x) < lead:
            return coin("1")
        return coin(next_q[x[-1]]) if (len(x) - lead) % 2 else coin(q)

    return overlap(target, drafter)


def steady(p: str, q: str, *, lead: int = 0) -> RequestModel:
    """The same laws at every position behind `lead` sure tokens."""
    return overlap(lambda x: coin("1") if len(x) < lead else coin(p), lambda x: coin("1") if len(x) < lead else coin(q))


ONE_REQUEST_MS = {1: 1.0, 2: 2.0, 3: 2.0}
"""Of A: one row, or the same for two and three."""
TWO_REQUEST_MS = {2: 2.0, 3: 2.5, 4: 3.2, 5: 3.3, 6: 3.4}
"""Of A and B."""


def first(lead: int = 0) -> RequestModel:
    """After draft 0 the next one is sure to stand, after draft 1 sure to fall."""
    return cliff("2/3", "1/3", ("1/2", "0"), ("1/2", "1"), lead=lead)


def second(lead: int = 0) -> RequestModel:
    return cliff("3/5", "2/5", ("1/2", "0"), ("1/2", "1"), lead=lead)


def mirrored(lead: int = 0) -> RequestModel:
    """As `first`, with the tokens exchanged."""
    return cliff("1/3", "2/3", ("0", "1/2"), ("1", "1/2"), lead=lead)


@dataclass(frozen=True, slots=True, kw_only=True)
class CliffCosts:
    """A StepCosts: milliseconds of a pass by its rows, and of each draft drawn.

    by_rows: beyond the largest, as it. tiers: as in the protocol.
    """

    by_rows: Mapping[int, float]
    draft_ms: float = 0.0
    gamma_max: int = 2
    tiers: tuple[int, ...] = ()

    def at(self, num_sequences: int, context: float, *, sampled: bool = True) -> CostCurve:
        return _Curve(self)


@dataclass(frozen=True, slots=True)
class _Curve:
    costs: CliffCosts

    def step_ms(self, rows: Ints, *, waiting: int, gamma: int) -> Floats:
        known = sorted(self.costs.by_rows)
        padded = [next((tier for tier in self.costs.tiers if tier >= count), count) for count in rows.tolist()]
        table = [self.costs.by_rows[next((r for r in known if r >= count), known[-1])] for count in padded]
        return np.array(table) + self.costs.draft_ms * gamma
