"""What the operator set: policies, their revision, compare-and-set. Knows no load, no plan and no wire format."""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import SpeculationSettings
from runtime.front.errors import InvalidRequest, StaleRevision


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
    if speculation.policy == "off" or gamma_max == 0:
        return Off()
    return Fixed(min(speculation.gamma, gamma_max))


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
