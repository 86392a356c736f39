"""What may be seen of the planner of draft lengths, as frozen values. Knows no wire format and no metric."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from runtime.verification.policy import Policy


class ProfileState(Enum):
    """OK: measured on this geometry, and what it predicts comes true. STALE: too old, or its predictions have been far
    off for long. FOREIGN: of another model, layout or machine. All but OK make `dynamic` run at a fixed length."""

    OK = "ok"
    MISSING = "missing"
    STALE = "stale"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileStatus:
    """detail: which profile is in use, or why none is, with the remedy."""

    state: ProfileState
    detail: str

    @property
    def is_usable(self) -> bool:
        return self.state is ProfileState.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowView:
    """A policy that plans beside the one in force. Sums since it was set, over the steps that both planned.

    agreed: steps for which both chose the same draft length. tokens, step_s: committed tokens and seconds predicted for
        the policy in force; the shadow_ ones for the shadow. steps_by_gamma: of the shadow, from 0.
    """

    policy: Policy
    steps: int
    agreed: int
    tokens: float
    step_s: float
    shadow_tokens: float
    shadow_step_s: float
    steps_by_gamma: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationView:
    """A moment of the planner; sums are since the engine started.

    gamma, budget, rows: of the newest step: drafts drawn for each sequence, draft rows verified at most, rows of its
        target pass. predicted_s, measured_s: its seconds; predicted is 0 where there is no profile.
    predicted_steps: steps that had a prediction; predicted_sum_s, measured_sum_s, error_sum_s: over those, seconds and
        the absolute differences.
    zero_budget_steps: drafts waited and none was verified. explored_steps: drafted or verified more, to learn.
    steps_by_gamma: by drafts drawn, from 0 to γ_max. budget_sum: of all steps, where drafts waited.
    survival_by_position: estimated share of drafts that stand, over the sequences that run; () where none has drafted.
    calibration_error_by_position: expected calibration error of the confidences; calibration_version: the step after
        which they were fitted, 0 before.
    fallback: why `dynamic` runs as a fixed draft length at the moment; empty where it does not.
    """

    profile: ProfileStatus
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
    steps_by_gamma: tuple[int, ...] = ()
    budget_sum: int = 0
    survival_by_position: tuple[float, ...] = ()
    calibration_error_by_position: tuple[float, ...] = ()
    calibration_version: int = 0
    fallback: str = ""
    shadow: ShadowView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What one draft length would bring in a step.

    budget: draft rows of all sequences that are worth verifying. tokens: committed per sequence, by survival;
    geometric_tokens: by the formula (1 − α^(γ+1)) / (1 − α) at one rate of acceptance α (2211.17192, eq. 1).
    """

    gamma: int
    budget: int
    tokens: float
    geometric_tokens: float
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Drafts of about one confidence: its mean, their mean acceptance, and how many, older ones counting less."""

    confidence: float
    acceptance: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceReport:
    """Advice for a load, per draft length from 0.

    num_sequences: in decode; context: their mean length, tokens. acceptance: α, of drafts that verification reached.
    sentence: for an operator, with the figures that speak for it.
    reliability: per draft position, bins of confidence that have drafts; calibration_error_by_position: their mean
        distance from what came of them.
    """

    num_sequences: int
    context: int
    advice: tuple[Advice, ...]
    acceptance: float
    survival_by_position: tuple[float, ...]
    best_gamma: int
    sentence: str
    reliability: tuple[tuple[ReliabilityBin, ...], ...] = ()
    calibration_error_by_position: tuple[float, ...] = ()
