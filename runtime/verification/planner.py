"""How far to speculate in one step: a pure function of the policy and the load. Knows no sequence and no draft.

The answer for step t may rest on the load at t and on statistics frozen before the drafts of t were drawn, never on the
waiting drafts or their confidences: those only rank entries, and only in the worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from runtime.verification.policy import Fixed, Off, Policy
from workers.plan import VERIFY_EVERYTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What runs and waits when a step is planned: sequences in decode, sequences in prefill, requests in the queue."""

    num_decoding: int
    num_prefilling: int
    num_waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """One step's share of StepPlan: drafts to draw, draft rows to verify, whether the drafter runs."""

    gamma: int
    verify_budget: int
    feed_drafter: bool


NO_SPECULATION = Speculation(gamma=0, verify_budget=VERIFY_EVERYTHING, feed_drafter=False)
"""Nothing new is drafted. Drafts that wait from before a change of policy are still verified."""


def plan_speculation(policy: Policy, load: Load) -> Speculation:
    """Decides γ, the verify budget K and whether the drafter is fed.

    The fixed policy asks for the same γ under any load.
    """
    match policy:
        case Off() | Fixed(gamma=0):
            return NO_SPECULATION
        case Fixed(gamma=gamma):
            return Speculation(gamma=gamma, verify_budget=VERIFY_EVERYTHING, feed_drafter=True)
        case _:
            assert_never(policy)
