"""The length of a round by formula, were every draft to stand with one probability. Pure; exact on fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import TypeVar

Rate = TypeVar("Rate", float, Fraction)


def geometric_length(alpha: Rate, gamma: int) -> Rate:
    """Tokens of a round of γ drafts, the target's own among them: (1 − α^(γ+1)) / (1 − α), α from 0 to 1 (Leviathan et
    al. 2211.17192, eq. 1)."""
    return alpha * (gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
