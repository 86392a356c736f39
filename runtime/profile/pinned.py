"""Speculation that is told rather than chosen. Knows no load and no cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.verification.speculation import BatchSpeculation, Load, Speculation
from workers.plan import VERIFY_EVERYTHING


@dataclass(slots=True)
class PinnedPlanner:
    """A `StepPlanner` that answers what it holds. gamma, feeds_drafter, budget: of the next step; budget for each
    data-parallel rank."""

    gamma: int = 0
    feeds_drafter: bool = True
    budget: int = VERIFY_EVERYTHING

    def decide(self, step_id: int, loads: Sequence[Load]) -> Speculation:
        """Whatever the loads."""
        return Speculation(
            gamma=self.gamma,
            feed_drafter=self.feeds_drafter,
            batches=tuple(BatchSpeculation(verify_budget=self.budget) for _ in loads),
        )
