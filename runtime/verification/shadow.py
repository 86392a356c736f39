"""A second policy that plans beside the one in force, from the same past, and runs nothing: what would it have done?

Knows no store and no waiting draft.
"""

from __future__ import annotations

import logging

from runtime.verification.planner import Choice
from runtime.verification.policy import Policy
from runtime.verification.tuner import Tuner
from runtime.verification.view import ShadowView

log = logging.getLogger(__name__)

LOG_EVERY = 512
"""Steps between lines of the log."""


class Shadow:
    """One policy's answers beside those of the policy in force. gamma_max: longest draft of the worker."""

    def __init__(self, policy: Policy, gamma_max: int) -> None:
        self.policy = policy
        self.tuner = Tuner()
        self._steps = self._agreed = 0
        self._tokens = self._step_s = self._shadow_tokens = self._shadow_step_s = 0.0
        self._steps_by_gamma = [0] * (gamma_max + 1)

    def note(self, in_force: Choice, own: Choice) -> None:
        """One step that both have planned: the steady states that they would run in."""
        self._steps += 1
        self._agreed += in_force.gamma == own.gamma
        self._tokens += in_force.tokens
        self._step_s += in_force.step_ms / 1000
        self._shadow_tokens += own.tokens
        self._shadow_step_s += own.step_ms / 1000
        self._steps_by_gamma[own.gamma] += 1
        if self._steps % LOG_EVERY == 0:
            log.info("%s", self.describe())

    def view(self) -> ShadowView:
        return ShadowView(
            policy=self.policy,
            steps=self._steps,
            agreed=self._agreed,
            tokens=self._tokens,
            step_s=self._step_s,
            shadow_tokens=self._shadow_tokens,
            shadow_step_s=self._shadow_step_s,
            steps_by_gamma=tuple(self._steps_by_gamma),
        )

    def describe(self) -> str:
        """In one line, for the log."""
        lengths = ", ".join(f"γ {gamma}: {count}" for gamma, count in enumerate(self._steps_by_gamma) if count)
        return (
            f"shadow {self.policy}: the same draft length in {self._agreed} of {self._steps} steps ({lengths}); "
            f"predicted {self._shadow_tokens / self._shadow_step_s:.4g} tokens/s, the policy in force "
            f"{self._tokens / self._step_s:.4g}"
        )
