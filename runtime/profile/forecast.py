"""What a profile says of steps in which all drafts are verified: milliseconds, and tokens by formula. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.geometric import geometric_length
from runtime.profile.document import Profile
from runtime.verification.profile import ProfileCosts

ACCEPTANCES = (0.5, 0.7, 0.9)
"""Rates of acceptance that forecasts are shown for."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A profile with its costs, asked for steady states: as many drafts wait as are drawn, and all are verified."""

    profile: Profile
    costs: ProfileCosts

    @classmethod
    def of(cls, profile: Profile) -> Forecast:
        return cls(profile, ProfileCosts(profile))

    @property
    def loads(self) -> list[int]:
        """Sequences of a data-parallel rank that were measured, rising."""
        return sorted({cell.num_sequences for cell in self.profile.cells})

    @property
    def gammas(self) -> list[int]:
        """Draft lengths that were measured, rising."""
        return sorted({cell.gamma for cell in self.profile.cells})

    def contexts(self, load: int) -> list[float]:
        """Mean committed lengths at which a load was measured, rising."""
        return sorted({cell.context for cell in self.profile.cells if cell.num_sequences == load})

    @property
    def kinds(self) -> list[bool]:
        """Greedy, sampled: those that were measured."""
        return sorted({cell.sampled for cell in self.profile.cells})

    def step_ms(self, load: int, gamma: int, *, context: float | None = None, sampled: bool = True) -> float:
        """context: the shortest where none is given."""
        curve = self.costs.at(load, self.contexts(load)[0] if context is None else context, sampled=sampled)
        return float(curve.step_ms(np.array([load * (1 + gamma)]), waiting=gamma, gamma=gamma)[0])

    def tokens_per_s(self, load: int, gamma: int, acceptance: float, *, sampled: bool = True) -> float:
        """Of all data-parallel ranks, were every draft to stand with that one probability."""
        tokens = self.profile.identity.dp * load * geometric_length(acceptance, gamma)
        return 1000 * tokens / self.step_ms(load, gamma, sampled=sampled)

    def best_gamma(self, load: int, acceptance: float, gammas: Sequence[int], *, sampled: bool = True) -> int:
        """Of the most tokens per second; the shortest of equals."""
        return max(gammas, key=lambda gamma: (self.tokens_per_s(load, gamma, acceptance, sampled=sampled), -gamma))
