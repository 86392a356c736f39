"""How often simulated drafts stand, and what a drafter says of it before. Knows no plan, no rank and no policy.

For draft k of a round, given that those before it stand:

    chance      p ~ Beta with the mean of the position and of the sequence
    score       logit p + noise, what the rank reports and calibration makes a confidence of
    coin        stands with probability p; drawn after the score, from noise of its own

A sequence's rounds depend on the seed and its number alone, not on the policy, so that policies meet the same luck.

Shapes: G draft positions, T rounds of a hand, S slots, N slots that draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.verification.costs import Floats, Ints

SCORE_LIMIT = 30.0
"""Scores are clipped to ± this, as ranks clip theirs."""
ROUNDS_AT_A_TIME = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """rates: mean chance of draft 1, 2, … given those before it; the last one stands for all further drafts.
    decay: each further draft beyond those named has this share of the rate before it.
    concentration: of the Beta that a draft's chance is drawn from; None makes every chance its mean.
    spread: how far apart sequences lie, from 0, all alike, to 1: uniformly between 0 and twice the mean or, where
        that is nearer, as far below 1 as above the mean.
    score_noise: standard deviation of a score about the log-odds of the chance.

    Raises ValueError, which names the field, for what is no such model.
    """

    rates: tuple[float, ...] = (0.8,)
    decay: float = 1.0
    concentration: float | None = 8.0
    spread: float = 0.5
    score_noise: float = 0.5

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise ValueError(f"acceptance is {self.rates}: give shares from 0 to 1, one or more")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is {self.decay:g}: give a share above 0, at most 1")
        if self.concentration is not None and not (self.concentration > 0 and math.isfinite(self.concentration)):
            raise ValueError(f"concentration is {self.concentration:g}: give a number above 0, or none")
        if not 0 <= self.spread <= 1:
            raise ValueError(f"spread is {self.spread:g}: give a share from 0 to 1")
        if not (self.score_noise >= 0 and math.isfinite(self.score_noise)):
            raise ValueError(f"score_noise is {self.score_noise:g}: give a number from 0")

    def means(self, gamma_max: int) -> Floats:
        """By position, [G]."""
        known = list(self.rates[:gamma_max])
        while len(known) < gamma_max:
            known.append(known[-1] * self.decay)
        return np.array(known)


@dataclass(frozen=True, slots=True)
class Hands:
    """Rounds of drafts to come, or of the ones that wait: chance, score, coin; each [.., G], coin True to stand."""

    chance: Floats
    score: NDArray[np.float32]
    stands: NDArray[np.bool_]

    @classmethod
    def blank(cls, *shape: int) -> Hands:
        return cls(np.zeros(shape), np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.bool_))

    def __getitem__(self, index: Any) -> Hands:
        return Hands(self.chance[index], self.score[index], self.stands[index])

    def __setitem__(self, index: Any, hands: Hands) -> None:
        self.chance[index], self.score[index], self.stands[index] = hands.chance, hands.score, hands.stands


class Luck:
    """One sequence's rounds, in order."""

    def __init__(self, model: Acceptance, gamma_max: int, seed: tuple[int, ...]) -> None:
        self._model = model
        self._generator = np.random.default_rng(seed)
        mean_G = model.means(gamma_max)
        place = self._generator.uniform(-1, 1)
        self._mean_G = mean_G + model.spread * place * np.minimum(mean_G, 1 - mean_G)

    def rounds(self, number: int) -> Hands:
        """The next ones, [number, G]."""
        model, generator, mean_G = self._model, self._generator, self._mean_G
        shape = (number, len(mean_G))
        chance_TG = np.broadcast_to(mean_G, shape)
        if model.concentration is not None:
            # A Beta's parameters are above 0; a mean at an end is a point.
            inner_G = np.clip(mean_G, 1e-9, 1 - 1e-9)
            drawn_TG = generator.beta(inner_G * model.concentration, (1 - inner_G) * model.concentration, shape)
            chance_TG = np.where((mean_G > 0) & (mean_G < 1), drawn_TG, chance_TG)
        with np.errstate(divide="ignore"):
            odds_TG = np.log(chance_TG) - np.log1p(-chance_TG)
        noise_TG = model.score_noise * generator.standard_normal(shape)
        score_TG = np.clip(odds_TG + noise_TG, -SCORE_LIMIT, SCORE_LIMIT).astype(np.float32)
        return Hands(np.array(chance_TG), score_TG, generator.random(shape) < chance_TG)


class Decks:
    """The rounds of all slots of a data-parallel rank, drawn ahead a few at a time."""

    def __init__(self, model: Acceptance, gamma_max: int, num_slots: int, seed: int) -> None:
        self._model, self._gamma_max, self._seed = model, gamma_max, seed
        self._lucks: list[Luck | None] = [None] * num_slots
        self._hands_STG = Hands.blank(num_slots, ROUNDS_AT_A_TIME, gamma_max)
        self._next_S = np.full(num_slots, ROUNDS_AT_A_TIME)

    def open(self, slot: int, uid: int) -> None:
        """A slot has a new tenant."""
        self._lucks[slot] = Luck(self._model, self._gamma_max, (self._seed, uid))
        self._next_S[slot] = ROUNDS_AT_A_TIME

    def draw(self, slots_N: Ints) -> Hands:
        """The next round of each slot, [N, G]."""
        for slot in slots_N[self._next_S[slots_N] == ROUNDS_AT_A_TIME].tolist():
            luck = self._lucks[slot]
            assert luck is not None, f"slot {slot} has no tenant"
            self._hands_STG[slot] = luck.rounds(ROUNDS_AT_A_TIME)
            self._next_S[slot] = 0
        hands = self._hands_STG[slots_N, self._next_S[slots_N]]
        self._next_S[slots_N] += 1
        return hands
