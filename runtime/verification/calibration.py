"""From a drafter's scores to probabilities that its drafts stand, learnt while serving. Knows no plan and no sequence.

Per temperature class and draft position, σ(slope · score + offset), fitted by Newton's method to the exact acceptance
probabilities of the newest positions that verification reached; what has seen little stays close to what has seen more:

    identity ◀── all classes, position 1 ◀── all classes, position 2 ◀── …
                        ▲                            ▲
                 class c, position 1          class c, position 2

Positions are seen only where admission sent them to verification. Among drafts of one score that is harmless, since the
score is what admission went by; for rates by position it is not, so those are learnt from rounds alone in which nothing
was left out. Scores and labels are of drafts whose step is over; nothing here is of drafts that wait.

Shapes: C temperature classes, G positions, W samples kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.verification.costs import Floats, Ints
from runtime.verification.view import ReliabilityBin
from workers.plan import IDENTITY, NUM_TEMPERATURE_CLASSES, Calibration

WINDOW = 256
"""Samples that a class and position are fitted to: the newest."""
PRIOR_WEIGHT = 64.0
"""Samples that what a fit is drawn to counts for."""
REFIT_EVERY = 64
"""Steps between fits."""
RATE_WINDOW = 256.0
"""Rounds after which an observation of a rate counts half, of a position that they did not reach too: what was last
seen of long drafts when others were asked for is a bad witness, and drafting them again a cheap one."""
NEWEST_WINDOW = 32.0
"""The same, of the newest first drafts, that tell whether something has changed."""
NEWEST_ENOUGH = 40.0
CHANGE = 0.25
"""First drafts of a class that stand so much more or less often than they did, by which what was learnt of the class is
forgotten: some five standard deviations of the newest."""
RATE_PRIOR_WEIGHT = 16.0
FIRST_RATE = 0.7
"""Acceptance of a first draft before any was seen; later ones are drawn to the position before."""
NUM_BINS = 10
"""Of the calibration error."""
ERROR_WINDOW = 2048.0
"""Samples after which one counts half in the calibration error."""

LARGEST_KEPT = 1e6
"""Of what a state may hold: slopes, offsets, and counts, which decay."""

_NEWTON_STEPS = 4
"""From the last fit, which mostly is near; one that starts from afar is gone on with at the next fit."""
_MAX_LOG_ODDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Positions that verification reached in one step, one entry each.

    classes, positions: int64. scores: float64, log-odds. acceptance: float64 in [0, 1], exact.
    uncensored: bool; nothing of the round that the entry is of was left out.
    """

    classes: Ints
    positions: Ints
    scores: Floats
    acceptance: Floats
    uncensored: np.ndarray[Any, np.dtype[np.bool_]]


class Calibrator:
    """Owns the samples, the fit in force, and the rates by position.

    gamma_max: G. step: of the newest drafts that anything here is of; −1 before any.
    """

    def __init__(self, gamma_max: int) -> None:
        shape = (NUM_TEMPERATURE_CLASSES, gamma_max)
        self.gamma_max = gamma_max
        self.step = -1
        self.calibration: Calibration = IDENTITY
        self._slope_CG, self._offset_CG = np.ones(shape), np.zeros(shape)
        self._score_CGW, self._label_CGW = np.zeros((*shape, WINDOW)), np.zeros((*shape, WINDOW))
        self._seen_CG = np.zeros(shape, dtype=np.int64)
        self._stood_CG, self._reached_CG = np.zeros(shape), np.zeros(shape)
        self._newest_stood_C, self._newest_reached_C = np.zeros(shape[0]), np.zeros(shape[0])
        self._pooled_slope_G, self._pooled_offset_G = np.ones(gamma_max), np.zeros(gamma_max)
        self._last_fit = 0
        self._predicted_GN, self._observed_GN, self._count_GN = (np.zeros((gamma_max, NUM_BINS)) for _ in range(3))

    def confidence(self, scores: Floats, classes: Ints) -> Floats:
        """Probabilities that drafts stand, given those before them.

        scores: float64 [R, up to G]; classes: int64 [R]. NaN in, NaN out.
        """
        width = scores.shape[1]
        odds = self._slope_CG[classes, :width] * scores + self._offset_CG[classes, :width]
        return sigmoid(odds)

    def note(self, reached: Reached, *, step: int) -> None:
        """Learns of positions. step: in which their drafts were drawn, or a later one."""
        self.step = max(self.step, step)
        if not len(reached.positions):
            return
        self._note_error(reached)
        kept = reached.uncensored
        index = (reached.classes[kept], reached.positions[kept])
        decay = 0.5 ** (np.bincount(index[1], minlength=1).max() / RATE_WINDOW)
        self._stood_CG *= decay
        self._reached_CG *= decay
        np.add.at(self._stood_CG, index, reached.acceptance[kept])
        np.add.at(self._reached_CG, index, 1.0)
        first = kept & (reached.positions == 0)
        self._note_newest(reached.classes[first], reached.acceptance[first])
        for c, g, score, label in zip(
            reached.classes.tolist(),
            reached.positions.tolist(),
            reached.scores.tolist(),
            reached.acceptance.tolist(),
            strict=True,
        ):
            place = self._seen_CG[c, g] % WINDOW
            self._score_CGW[c, g, place], self._label_CGW[c, g, place] = score, label
            self._seen_CG[c, g] += 1

    def refit(self, step: int) -> Calibration:
        """Fits anew where REFIT_EVERY steps have passed since the last fit; the calibration of the next plans.

        step: the last one that was noted, which names the version.
        """
        if step - self._last_fit < REFIT_EVERY or not self._seen_CG.any():
            return self.calibration
        self._last_fit = step
        pooled_slope, pooled_offset = self._fit_pooled()
        mask_CGW = np.arange(WINDOW) < self._seen_CG[..., None]
        self._slope_CG, self._offset_CG = _fit(
            self._score_CGW,
            self._label_CGW,
            mask_CGW,
            prior=(pooled_slope, pooled_offset),
            start=(self._slope_CG, self._offset_CG),
        )
        slopes, offsets = self._slope_CG.astype(np.float32), self._offset_CG.astype(np.float32)
        self.calibration = Calibration(
            version=step, slopes=tuple(slopes.ravel().tolist()), offsets=tuple(offsets.ravel().tolist())
        )
        return self.calibration

    def rates(self) -> Floats:
        """Acceptance by class and position, [C, G], given that all before stood: of rounds in which nothing was left
        out. What has seen little is drawn to all classes, and those to the position before."""
        stood_G, reached_G = self._stood_CG.sum(0), self._reached_CG.sum(0)
        pooled_G = np.empty(self.gamma_max)
        before = FIRST_RATE
        for g in range(self.gamma_max):
            before = (stood_G[g] + RATE_PRIOR_WEIGHT * before) / (reached_G[g] + RATE_PRIOR_WEIGHT)
            pooled_G[g] = before
        rates: Floats = (self._stood_CG + RATE_PRIOR_WEIGHT * pooled_G) / (self._reached_CG + RATE_PRIOR_WEIGHT)
        return rates

    @property
    def num_reached(self) -> float:
        """Reached positions that the rates rest on, older ones counting less."""
        return float(self._reached_CG.sum())

    def reached_by_class(self) -> Floats:
        """The same by temperature class, [C]."""
        reached: Floats = self._reached_CG.sum(1)
        return reached

    @property
    def acceptance(self) -> float:
        """One rate over all classes and positions; of reached positions. 0 before any was seen."""
        reached = self._reached_CG.sum()
        return float(self._stood_CG.sum() / reached) if reached else 0.0

    def errors(self) -> tuple[float, ...]:
        """Expected calibration error by position (Naeini et al., AAAI 2015): over bins of confidence, the mean distance
        between what was foretold and what came, weighted by samples. Confidences count as they were before the samples
        were learnt from."""
        total_G = np.maximum(self._count_GN.sum(1), 1e-12)
        return tuple((np.abs(self._predicted_GN - self._observed_GN).sum(1) / total_G).tolist())

    def reliability(self) -> tuple[tuple[ReliabilityBin, ...], ...]:
        """By position, the bins of confidence that have samples."""
        columns = (self._predicted_GN, self._observed_GN, self._count_GN)
        return tuple(
            tuple(
                ReliabilityBin(confidence=predicted / weight, acceptance=observed / weight, weight=weight)
                for predicted, observed, weight in zip(*(column[g].tolist() for column in columns), strict=True)
                if weight > 0
            )
            for g in range(self.gamma_max)
        )

    def state(self) -> dict[str, Any]:
        """All that was learnt, as JSON holds it; not the samples."""
        return {
            "gamma_max": self.gamma_max,
            "slopes": self._slope_CG.tolist(),
            "offsets": self._offset_CG.tolist(),
            "stood": self._stood_CG.tolist(),
            "reached": self._reached_CG.tolist(),
        }

    def restore(self, state: Any) -> None:
        """Goes on from what `state` gave, before anything is noted; the samples are gathered anew. The calibration is
        of version 0, as no step of this server has a part in it.

        Raises ValueError when it is of another form.
        """
        shape = self._seen_CG.shape
        try:
            arrays = [np.array(state[name], dtype=np.float64) for name in ("slopes", "offsets", "stood", "reached")]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a calibration: {error!r}") from None
        if any(array.shape != shape or not np.isfinite(array).all() for array in arrays):
            raise ValueError(f"not a calibration of {shape[0]} classes and {shape[1]} positions")
        slope, offset, stood, reached = arrays
        if any((np.abs(array) > LARGEST_KEPT).any() for array in arrays):
            raise ValueError(
                f"a calibration with numbers beyond {LARGEST_KEPT:g}, which nothing that was learnt comes to"
            )
        if (slope < 0).any() or (stood < 0).any() or (stood > reached + 1e-9).any():
            raise ValueError("a calibration whose slopes fall or whose rates pass 1")
        self._slope_CG, self._offset_CG, self._stood_CG, self._reached_CG = slope, offset, stood, reached
        slopes, offsets = slope.astype(np.float32), offset.astype(np.float32)
        self.calibration = Calibration(slopes=tuple(slopes.ravel().tolist()), offsets=tuple(offsets.ravel().tolist()))

    def _note_newest(self, classes: Ints, acceptance: Floats) -> None:
        """Of first drafts. Forgets the rates of classes that they contradict."""
        counts_C = np.bincount(classes, minlength=len(self._newest_reached_C))
        decay_C = 0.5 ** (counts_C / NEWEST_WINDOW)
        self._newest_stood_C = self._newest_stood_C * decay_C + np.bincount(classes, acceptance, len(counts_C))
        self._newest_reached_C = self._newest_reached_C * decay_C + counts_C
        rate_C = self._stood_CG[:, 0] / np.maximum(self._reached_CG[:, 0], 1.0)
        newest_C = self._newest_stood_C / np.maximum(self._newest_reached_C, 1.0)
        changed_C = (np.abs(newest_C - rate_C) > CHANGE) & (self._newest_reached_C >= NEWEST_ENOUGH)
        if changed_C.any():
            self._stood_CG[changed_C], self._reached_CG[changed_C] = 0.0, 0.0
            self._stood_CG[changed_C, 0] = self._newest_stood_C[changed_C]
            self._reached_CG[changed_C, 0] = self._newest_reached_C[changed_C]

    def _fit_pooled(self) -> tuple[Floats, Floats]:
        """Over all classes, position by position, each drawn to the one before."""
        slope_G, offset_G = self._pooled_slope_G, self._pooled_offset_G
        before = 1.0, 0.0
        for g in range(self.gamma_max):
            mask_W = (np.arange(WINDOW) < self._seen_CG[:, g, None]).ravel()
            before = _fit(
                self._score_CGW[:, g].ravel()[mask_W],
                self._label_CGW[:, g].ravel()[mask_W],
                1.0,
                prior=before,
                start=(slope_G[g], offset_G[g]),
            )
            slope_G[g], offset_G[g] = before
        return slope_G, offset_G

    def _note_error(self, reached: Reached) -> None:
        odds = (
            self._slope_CG[reached.classes, reached.positions] * reached.scores
            + self._offset_CG[reached.classes, reached.positions]
        )
        confidence = sigmoid(odds)
        bins = np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        decay = 0.5 ** (np.bincount(reached.positions, minlength=self.gamma_max) / ERROR_WINDOW)[:, None]
        for sums, values in (
            (self._predicted_GN, confidence),
            (self._observed_GN, reached.acceptance),
            (self._count_GN, np.ones(len(bins))),
        ):
            sums *= decay
            np.add.at(sums, (reached.positions, bins), values)


def sigmoid(log_odds: Floats) -> Floats:
    """Probability of log-odds, which are clipped to ± 30."""
    return 1.0 / (1.0 + np.exp(-np.clip(log_odds, -_MAX_LOG_ODDS, _MAX_LOG_ODDS)))


def _fit(score_xW: Floats, label_xW: Floats, mask_xW: Any, *, prior: Any, start: Any) -> tuple[Any, Any]:
    """Slopes and offsets of many cells at once, x standing for their shape: Newton's method on the cross-entropy of
    soft labels, with a quadratic pull to the prior that weighs as PRIOR_WEIGHT samples of even odds and unit score do.
    A slope below 0, by which surer drafts would stand more rarely, becomes 0.

    prior, start: pairs of slope and offset.
    """
    pull = PRIOR_WEIGHT / 4
    slope_x, offset_x = (np.asarray(part, dtype=np.float64) for part in start)
    for _ in range(_NEWTON_STEPS):
        p_xW = sigmoid(slope_x[..., None] * score_xW + offset_x[..., None])
        error_xW = (p_xW - label_xW) * mask_xW
        weight_xW = np.maximum(p_xW * (1 - p_xW), 1e-6) * mask_xW
        weighted_xW = weight_xW * score_xW
        gradient_slope = (error_xW * score_xW).sum(-1) + pull * (slope_x - prior[0])
        gradient_offset = error_xW.sum(-1) + pull * (offset_x - prior[1])
        h_ss, h_so = (weighted_xW * score_xW).sum(-1) + pull, weighted_xW.sum(-1)
        h_oo = weight_xW.sum(-1) + pull
        determinant = h_ss * h_oo - h_so * h_so
        # A full step may overshoot where the curve is flat; a bounded one still arrives.
        step_slope = np.clip((h_oo * gradient_slope - h_so * gradient_offset) / determinant, -1, 1)
        step_offset = np.clip((h_ss * gradient_offset - h_so * gradient_slope) / determinant, -2, 2)
        slope_x, offset_x = np.maximum(slope_x - step_slope, 0.0), offset_x - step_offset
    return slope_x, offset_x
