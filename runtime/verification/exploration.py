"""Steps that draft further than pays, to learn what is there: when, who, how far. Pure; knows no draft and no past.

What admission leaves out is never seen, and so would be taken for ever for what it once was. By the step's number, so
that no draft has a say in it, a few sequences draw beyond the present length, and what they drew is verified whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.verification.costs import CostCurve
from runtime.verification.planner import Choice
from runtime.verification.speculation import Load

EXPLORERS = 8
"""Sequences that explore together, of all data-parallel ranks; each rank has one at least."""
BEYOND = 2
"""Drafts beyond the present length that they draw."""
DEEP_EVERY = 8
"""One exploring step in so many draws as many as it may."""
RESTING = 4
"""Without speculation steps explore so many times more rarely: the drafter has to catch up with all sequences first."""
LITTLE = 128
"""Reached draft positions that show whether drafting may pay; while fewer are known it is explored eagerly."""
EAGER = 8
"""So many times more often."""


@dataclass(frozen=True, slots=True)
class Exploration:
    """step_id: in which the drafts are drawn. gamma: how many. uids: whose."""

    step_id: int
    gamma: int
    uids: frozenset[int]


def period(every: int, steady: Choice, num_reached: float) -> int:
    """Steps from one exploring step to the next. every: as told. num_reached: draft positions known of."""
    if num_reached < LITTLE:
        return max(2, every // EAGER)
    return every if steady.gamma else every * RESTING


def exploration(step_id: int, every: int, steady: Choice, longest: int, loads: Sequence[Load]) -> Exploration | None:
    """What to explore in this step; None where this is no step to explore in, or the present length hides nothing.

    every: steps from one to the next. steady: what the other sequences do. longest: draft that may be drawn.
    """
    if step_id % every or (steady.covers and steady.gamma == longest):
        return None
    turn = step_id // every
    gamma = longest if turn % DEEP_EVERY == 0 else min(longest, steady.gamma + BEYOND)
    share = max(1, EXPLORERS // len(loads))
    uids: set[int] = set()
    for load in loads:
        count = len(load.uids)
        uids.update(load.uids[(turn * share + place) % count] for place in range(min(share, count)))
    return Exploration(step_id, gamma, frozenset(uids)) if uids else None


def within_limit(
    found: Exploration, steady: Choice, curve: CostCurve, limit_ms: float, *, num_sequences: int
) -> Exploration | None:
    """The same with a draft so short that neither drawing it nor verifying it takes a step beyond the limit; None where
    none is.

    curve: of steps of this load. num_sequences: of the busiest data-parallel rank.
    """
    explorers = min(len(found.uids), num_sequences)
    of_others = (steady.rows - num_sequences) * (1 - explorers / num_sequences)
    for gamma in range(found.gamma, steady.gamma, -1):
        rows = num_sequences + math.ceil(of_others) + explorers * gamma
        drawing = curve.step_ms(np.array([steady.rows]), waiting=steady.gamma, gamma=gamma)
        verifying = curve.step_ms(np.array([rows]), waiting=gamma, gamma=steady.gamma)
        if max(drawing[0], verifying[0]) <= limit_ms:
            return Exploration(found.step_id, gamma, found.uids)
    return None
