"""How sure a drafter is of a draft that it has yet to draw: a score, and the confidence that calibration makes of it.

A score is a log-odds, float32, of the drafter's own law at temperature 1 and without cuts: the law that a greedy row is
sampled from is a point mass and would rank all its drafts alike. With p the largest probability, H the entropy in nats:

    margin             largest logit − second largest = log (p / second largest probability)
    max_probability    logit p
    entropy            logit exp(−H); exp(−H) is p where all tokens that have mass share it evenly
    head               what a head of the checkpoint makes of the hidden state that the law comes from

Never the probability of the token drawn, nor anything after it: admission would then favour some tokens over others and
bias the output. Knows no drafts.

Shapes: R rows, S sequences, C temperature classes, G draft positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parallel.vocabulary import Best
from workers.plan import IDENTITY, NUM_TEMPERATURE_CLASSES, Calibration, LoadError

SCORE_LIMIT = 30.0
"""Scores are clipped to ± this. One at the lower end, as of a law that is no number, is no confidence at all."""

Measure = Literal["margin", "max_probability", "entropy", "head"]


def choose_measure(wanted: Literal["auto"] | Measure, *, has_head: bool) -> Measure:
    """What scores are of. Raises LoadError, naming the setting, for a head that the checkpoint does not have."""
    if wanted == "auto":
        return "head" if has_head else "margin"
    if wanted == "head" and not has_head:
        raise LoadError(
            "speculation.confidence is head, but the checkpoint has no mtp.confidence_head.proj.weight; set it to auto "
            "or margin"
        )
    return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """head: log-odds [R] of hidden states [R, D]; there if the measure is."""

    measure: Measure
    head: Callable[[Tensor], Tensor] | None = None

    @property
    def needs(self) -> dict[str, bool]:
        """What to ask `parallel.vocabulary` for beside the best token."""
        return {
            "with_second": self.measure == "margin",
            "with_rest": self.measure == "max_probability",
            "with_entropy": self.measure == "entropy",
        }

    def score(self, best: Best, hidden_RD: Tensor) -> Tensor:
        """float32 [R] in ± SCORE_LIMIT. best: of the logits of `hidden_RD`, with what the measure needs."""
        score_R = self._log_odds(best, hidden_RD)
        return score_R.nan_to_num(nan=-SCORE_LIMIT).clamp(-SCORE_LIMIT, SCORE_LIMIT)

    def _log_odds(self, best: Best, hidden_RD: Tensor) -> Tensor:
        if self.measure == "head":
            assert self.head is not None
            return self.head(hidden_RD)
        if self.measure == "margin":
            assert best.second_R is not None
            return best.top_R - best.second_R
        if self.measure == "max_probability":
            assert best.rest_R is not None
            return -best.rest_R.log()
        assert best.entropy_R is not None
        # log (e / (1 − e)) with e = exp(−H).
        return -best.entropy_R - (-torch.expm1(-best.entropy_R)).log()


class Calibrator:
    """Confidence of scores under the plan's calibration, whose coefficients it keeps on the device while they last."""

    def __init__(self, gamma_max: int, device: torch.device) -> None:
        self._shape = (2, NUM_TEMPERATURE_CLASSES, gamma_max)
        self._device = device
        self._held = IDENTITY
        self._table_2CG = self._identity()

    def confidence(self, score_S: Tensor, class_S: Tensor, position: int, calibration: Calibration) -> Tensor:
        """float32 [S] in [0, 1] of the drafts at `position`. score_S: float32, of `Scorer`. class_S: int64.

        Raises ValueError for coefficients that are not one per class and position.
        """
        if calibration != self._held:
            self._table_2CG = self._table(calibration)
            self._held = calibration
        slope_S, offset_S = self._table_2CG[:, :, position].index_select(1, class_S).unbind(0)
        confidence_S = torch.sigmoid(slope_S * score_S + offset_S)
        return torch.where(score_S > -SCORE_LIMIT, confidence_S, 0.0)

    def _table(self, calibration: Calibration) -> Tensor:
        slopes, offsets = calibration.slopes, calibration.offsets
        if not slopes and not offsets:
            return self._identity()
        _, num_classes, gamma_max = self._shape
        if not len(slopes) == len(offsets) == num_classes * gamma_max:
            raise ValueError(
                f"calibration {calibration.version} has {len(slopes)} slopes and {len(offsets)} offsets, where "
                f"{num_classes} temperature classes of {gamma_max} positions are drafted"
            )
        return torch.tensor([slopes, offsets], dtype=torch.float32).view(self._shape).to(self._device)

    def _identity(self) -> Tensor:
        table_2CG = torch.zeros(self._shape, device=self._device)
        table_2CG[0] = 1.0
        return table_2CG
