"""What the operator set: policies, their revision, compare-and-set. Knows no load, no plan and no wire format."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from configs.schema import SpeculationSettings
from runtime.front.errors import InvalidRequest, StaleRevision

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Off:
    """Plain decoding; the drafter does not run."""

    def __str__(self) -> str:
        return "off"


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same draft length for every sequence. gamma = 0 serves exactly as `Off` does."""

    gamma: int

    def __str__(self) -> str:
        return f"fixed gamma={self.gamma}"


Policy = Off | Fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """effective_step: the first step planned under this policy."""

    policy: Policy
    revision: int
    effective_step: int


def initial_policy(speculation: SpeculationSettings, gamma_max: int) -> Policy:
    """The policy at start. `gamma_max` is the worker's and may be below the one asked for; a checkpoint without a
    drafter has 0."""
    return Off() if speculation.policy == "off" else _lowered(Fixed(speculation.gamma), gamma_max)


def _lowered(policy: Policy, gamma_max: int) -> Policy:
    """The policy with drafts no longer than `gamma_max`."""
    if isinstance(policy, Fixed) and policy.gamma > gamma_max:
        return Fixed(gamma_max) if gamma_max else Off()
    return policy


class PolicyStore:
    """Holds the one policy in force.

    gamma_max: longest draft that the worker's buffers hold.
    """

    def __init__(self, initial: Policy, *, gamma_max: int, effective_step: int) -> None:
        self.gamma_max = gamma_max
        self.state = PolicyState(policy=initial, revision=1, effective_step=effective_step)

    def set(self, policy: Policy, *, expected_revision: int | None, effective_step: int) -> PolicyState:
        """Replaces the policy and raises its revision.

        expected_revision: the revision the caller read; None sets whatever is in force.

        Raises StaleRevision when another revision is in force, InvalidRequest when the policy cannot be served.
        """
        if expected_revision is not None and expected_revision != self.state.revision:
            raise StaleRevision(
                f"the policy is at revision {self.state.revision} ({self.state.policy}), not {expected_revision}; "
                "read it again"
            )
        if isinstance(policy, Fixed) and not 0 <= policy.gamma <= self.gamma_max:
            raise InvalidRequest(
                "policy.fixed.gamma", f"{policy.gamma} is not within 0..{self.gamma_max} (the server's gamma_max)"
            )
        self.state = PolicyState(policy=policy, revision=self.state.revision + 1, effective_step=effective_step)
        return self.state

    def fit(self, gamma_max: int, *, effective_step: int) -> None:
        """Takes the limit of a worker that came back. A policy beyond it is lowered, under a new revision; one that an
        earlier limit lowered stays so."""
        self.gamma_max = gamma_max
        policy = _lowered(self.state.policy, gamma_max)
        if policy != self.state.policy:
            log.warning(
                "the worker drafts at most %d tokens now: policy %s becomes %s", gamma_max, self.state.policy, policy
            )
            self.state = PolicyState(policy=policy, revision=self.state.revision + 1, effective_step=effective_step)
