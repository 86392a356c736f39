"""How far to speculate in one step: a pure function of the policy and the load. Knows no sequence and no draft.

The answer for step t may rest on the load at t and on statistics frozen before the drafts of t were drawn, never on the
waiting drafts or their confidences: those only rank entries, and only in the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from runtime.verification.policy import Fixed, Off, Policy
from workers.plan import VERIFY_EVERYTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What runs on one data-parallel rank when a step is planned: sequences in decode, sequences in prefill."""

    num_decoding: int
    num_prefilling: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """One step's share of StepPlan: drafts to draw and whether the drafter runs, one answer for all ranks, since they
    join each other's passes; and draft rows to verify, a number for each batch."""

    gamma: int
    feed_drafter: bool
    verify_budgets: tuple[int, ...]


def plan_speculation(policy: Policy, loads: Sequence[Load], *, num_waiting: int) -> Speculation:
    """Decides γ, the verify budgets K and whether the drafter is fed.

    loads: one per data-parallel rank. num_waiting: requests in the queue.

    The fixed policy asks for the same γ under any load. Without speculation nothing new is drafted; drafts that wait
    from before a change of policy are still verified.
    """
    match policy:
        case Off() | Fixed(gamma=0):
            gamma, feed_drafter = 0, False
        case Fixed(gamma=gamma):
            feed_drafter = True
        case _:
            assert_never(policy)
    return Speculation(gamma=gamma, feed_drafter=feed_drafter, verify_budgets=tuple(VERIFY_EVERYTHING for _ in loads))
