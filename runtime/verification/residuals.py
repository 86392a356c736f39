"""How far the profile's predictions are off on this server, now: corrects them, and says when they are not to be used.

The profile was measured without a front, at another hour. The logarithm of measured over predicted time is taken to be

    what all steps of about R sequences share, which drifts     a neighbour on the machine, clients, heat
  + what is peculiar to γ drafts, which stays                   the profile's own error
  + noise

and is followed by a Kalman filter (Kalman 1960), one for each load. So a busy minute moves all draft lengths together,
those that are not in use too, and a change of length does not pass for a busy minute.

Pure bookkeeping; knows no plan and no clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from runtime.verification.costs import CostCurve, Floats, Ints, StepCosts

COMMON_SPREAD = 0.5
"""Standard deviation, before anything was measured, of what all steps of a load share. Spreads are of logarithms."""
PECULIAR_SPREAD = 0.08
"""The same of what is peculiar to a draft length."""
DRIFT = 0.005
"""By how much the shared part wanders in a step."""
NOISE = 0.1
"""Of one step."""
OUTLIER = 2.0
"""Steps further off than so many standard deviations count as if they were that far off."""
STALE_AFTER = 200
"""Steps of a load and draft length before the profile is judged by them."""
JUDGED_EVERY = 25
"""Steps between judgements, each of what runs then."""
STALE_ERROR = 0.3
"""Draft lengths that cost so much more or less than the profile says, beside what all steps do, as a share: the
profile does not tell lengths apart, and those that were not tried are as doubtful."""
STALE_RATIO = 3.0
"""Steps that all take so many times what the profile says, or as small a part of it, are those of another machine."""


class _Filter:
    """Steps of one load. Entry 0 of the state is what they share, entry 1 + γ what is peculiar to γ drafts."""

    def __init__(self, num_lengths: int, common: float) -> None:
        self.state = np.zeros(1 + num_lengths)
        self.state[0] = common
        self._covariance = np.diag([COMMON_SPREAD**2, *[PECULIAR_SPREAD**2] * num_lengths])
        self._num_seen = [0] * num_lengths

    def note(self, gamma: int, ratio: float) -> None:
        self._covariance[0, 0] += DRIFT**2
        seen = 1 + gamma
        gain = self._covariance[:, 0] + self._covariance[:, seen]
        spread = gain[0] + gain[seen] + NOISE**2
        error = ratio - self.factor(gamma)
        self._num_seen[gamma] += 1
        bound = OUTLIER * math.sqrt(spread)
        self.state += gain * (min(max(error, -bound), bound) / spread)
        self._covariance -= np.outer(gain, gain) / spread

    def factor(self, gamma: int) -> float:
        return float(self.state[0] + self.state[1 + gamma])

    def problem(self, gamma: int) -> str:
        """Why predictions of such steps are not to be used; empty while they are, or too few are known."""
        if self._num_seen[gamma] < STALE_AFTER:
            return ""
        common, peculiar = float(self.state[0]), float(self.state[1 + gamma])
        if abs(common) > math.log(STALE_RATIO):
            return f"steps take {math.exp(common):.2g} times what the profile says"
        if abs(peculiar) > math.log1p(STALE_ERROR):
            return f"drafts of {gamma} cost {math.expm1(peculiar):+.0%} beside what it says, other steps do not"
        return ""


@dataclass(frozen=True, slots=True)
class _Timing:
    step_id: int
    num_sequences: int
    gamma: int
    ratio: float


class Residuals:
    """Ratios of measured to predicted seconds of steps.

    The time of a step depends on the drafts that it drew, through the experts they went to. So it is held back until
    none of those waits any more, or it would have a say in what becomes of them.

    gamma_max: longest draft. problem: why predictions are not to be used; empty while they are.
    """

    def __init__(self, gamma_max: int) -> None:
        self.problem = ""
        self._num_lengths = gamma_max + 1
        self._filters: dict[int, _Filter] = {}
        self._newest: _Filter | None = None
        self._held: deque[_Timing] = deque()
        self._num_noted = 0

    def hold(self, step_id: int, *, num_sequences: int, gamma: int, raw_ms: float, measured_ms: float) -> None:
        """Takes the time of a step that ran as predicted, see counts.is_plain, to be learnt from later.

        raw_ms: as the profile alone predicted it.
        """
        if raw_ms > 0 and measured_ms > 0:  # a clock that stood still tells nothing
            self._held.append(_Timing(step_id, num_sequences, gamma, math.log(measured_ms / raw_ms)))

    def learn(self, *, before: int) -> None:
        """Learns from the times held of steps before this one: the one in which the oldest drafts that wait were
        drawn."""
        while self._held and self._held[0].step_id < before:
            self._learn(self._held.popleft())

    def _learn(self, timing: _Timing) -> None:
        load = _load(timing.num_sequences)
        if load not in self._filters:
            common = 0.0 if self._newest is None else float(self._newest.state[0])
            self._filters[load] = _Filter(self._num_lengths, common)
        self._newest = self._filters[load]
        self._newest.note(timing.gamma, timing.ratio)
        self._num_noted += 1
        if self._num_noted % JUDGED_EVERY == 0:
            self.problem = self._newest.problem(timing.gamma)

    def factor(self, num_sequences: int, gamma: int) -> float:
        """What to multiply the profile's prediction by."""
        known = self._filters.get(_load(num_sequences))
        if known is not None:
            return math.exp(known.factor(gamma))
        return 1.0 if self._newest is None else math.exp(float(self._newest.state[0]))


def _load(num_sequences: int) -> int:
    """Which loads are alike: powers of two."""
    return max(0, num_sequences - 1).bit_length()


@dataclass(frozen=True, slots=True)
class CorrectedCosts:
    """A profile's costs as they have turned out on this server."""

    raw: StepCosts
    residuals: Residuals

    @property
    def gamma_max(self) -> int:
        return self.raw.gamma_max

    @property
    def tiers(self) -> tuple[int, ...]:
        return self.raw.tiers

    def at(self, num_sequences: int, context: float, *, sampled: bool = True) -> CostCurve:
        return _CorrectedCurve(self.raw.at(num_sequences, context, sampled=sampled), self.residuals, num_sequences)


@dataclass(frozen=True, slots=True)
class _CorrectedCurve:
    raw: CostCurve
    residuals: Residuals
    num_sequences: int

    def step_ms(self, rows: Ints, *, waiting: int, gamma: int) -> Floats:
        factor = self.residuals.factor(self.num_sequences, gamma)
        return self.raw.step_ms(rows, waiting=waiting, gamma=gamma) * factor
