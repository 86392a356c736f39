"""What a planner remembers of a step: how it was decided, and what came of it. Values alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.verification.exploration import Exploration
from runtime.verification.history import Witnessed
from runtime.verification.planner import Choice
from runtime.verification.residuals import CorrectedCosts
from runtime.verification.rules import Rule, Rules
from runtime.verification.speculation import Load, Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """choice: what this step is predicted to be; None where nothing decodes or there is no profile. costs: by which.
    raw_ms: its time by the profile alone, without the corrections of that moment."""

    speculation: Speculation
    choice: Choice | None
    explored: Exploration | None = None
    costs: CorrectedCosts | None = None
    raw_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What the last decision followed the load with."""

    step_id: int
    loads: Sequence[Load]
    rules: Rules
    in_force: Sequence[Rule]
    costs: CorrectedCosts


@dataclass(frozen=True, slots=True)
class Over:
    """A step that is over. decision: as which it ran. measured_s: what it took."""

    seen: Witnessed
    decision: Decision | None
    measured_s: float
