"""What a step costs, as planning sees it: an interface, and the profile's answer to it is in `profile.py`. Pure.

    step = target pass + sampling and verification + commit and rollback      rows, the longest waiting draft
         + the drafter over those rows, and once more for each further draft  rows, drafts drawn
         + planning, links, booking                                           sequences

Times are milliseconds of a whole step, the slowest rank's, with all that ranks wait for each other.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class CostCurve(Protocol):
    """Steps of one load."""

    def step_ms(self, rows: Ints, *, waiting: int, gamma: int) -> Floats:
        """rows: of the target pass of the busiest data-parallel rank, rising; waiting: the longest draft that waits for
        a sequence of that pass, 0 where none does; gamma: drafts drawn at its end, 0 where the drafter does not run.

        Returns milliseconds, as many as rows, none below the one before it.
        """
        ...


class StepCosts(Protocol):
    """Costs of steps of one geometry: a model, a layout and a machine."""

    @property
    def gamma_max(self) -> int:
        """Longest draft that is priced."""
        ...

    @property
    def tiers(self) -> tuple[int, ...]:
        """Numbers of rows that passes are padded up to, rising; () where any number runs as it is."""
        ...

    def at(self, num_sequences: int, context: float, *, sampled: bool = True) -> CostCurve:
        """num_sequences: that a data-parallel rank decodes, 1 or more; context: their mean committed length, tokens;
        sampled: whether any of them is not greedy, so that laws are made of all logits."""
        ...
