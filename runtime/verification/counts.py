"""What was planned and what came of it, for those who watch. Knows no policy and no plan to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.settlement import Outcome
from runtime.verification.calibration import Calibrator
from runtime.verification.view import ProfileStatus, ShadowView, SpeculationView
from workers.plan import StepPlan

PROMPT_SHARE = 0.1
"""Of the rows of a step, those of prompts with which it still counts as plain: under load every other step has some."""


def is_plain(plan: StepPlan) -> bool:
    """Whether a step is what predictions are of: decodes, but for a few rows of prompts, and a drafter that lacks
    nothing."""
    return not plan.catches_up and all(
        sum(batch.num_known) - len(batch.slots) <= PROMPT_SHARE * (sum(batch.num_known) + sum(batch.num_drafts))
        for batch in plan.batches
    )


@dataclass(slots=True)
class SpeculationCounts:
    """Running sums; fields as in SpeculationView."""

    gamma: int = 0
    budget: int = 0
    rows: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    predicted_steps: int = 0
    predicted_sum_s: float = 0.0
    measured_sum_s: float = 0.0
    error_sum_s: float = 0.0
    zero_budget_steps: int = 0
    explored_steps: int = 0
    steps_by_gamma: list[int] = field(default_factory=list)
    budget_sum: int = 0

    def add(
        self,
        plan: StepPlan,
        *,
        rounds: Sequence[Outcome],
        predicted_s: float,
        measured_s: float,
        explores: bool,
    ) -> None:
        """Counts one step. predicted_s: 0 where nothing was predicted."""
        waiting = sum(sum(batch.num_drafts) for batch in plan.batches)
        admitted = sum(outcome.num_admitted for outcome in rounds)
        budget = sum(min(batch.verify_budget, sum(batch.num_drafts)) for batch in plan.batches)
        self.gamma, self.budget = plan.gamma, budget
        self.rows = max(
            (sum(batch.num_known) + min(batch.verify_budget, sum(batch.num_drafts)) for batch in plan.batches),
            default=0,
        )
        self.predicted_s, self.measured_s = predicted_s, measured_s
        if predicted_s:
            self.predicted_steps += 1
            self.predicted_sum_s += predicted_s
            self.measured_sum_s += measured_s
            self.error_sum_s += abs(predicted_s - measured_s)
        self.zero_budget_steps += bool(waiting) and not admitted
        self.explored_steps += explores
        self.steps_by_gamma += [0] * (plan.gamma + 1 - len(self.steps_by_gamma))
        self.steps_by_gamma[plan.gamma] += 1
        self.budget_sum += budget

    def view(
        self,
        *,
        profile: ProfileStatus,
        survival: tuple[float, ...],
        calibrator: Calibrator,
        fallback: str,
        shadow: ShadowView | None,
    ) -> SpeculationView:
        num_lengths = calibrator.gamma_max + 1
        return SpeculationView(
            profile=profile,
            gamma=self.gamma,
            budget=self.budget,
            rows=self.rows,
            predicted_s=self.predicted_s,
            measured_s=self.measured_s,
            predicted_steps=self.predicted_steps,
            predicted_sum_s=self.predicted_sum_s,
            measured_sum_s=self.measured_sum_s,
            error_sum_s=self.error_sum_s,
            zero_budget_steps=self.zero_budget_steps,
            explored_steps=self.explored_steps,
            steps_by_gamma=(*self.steps_by_gamma, *[0] * (num_lengths - len(self.steps_by_gamma))),
            budget_sum=self.budget_sum,
            survival_by_position=survival,
            calibration_error_by_position=calibrator.errors(),
            calibration_version=calibrator.calibration.version,
            fallback=fallback,
            shadow=shadow,
        )
