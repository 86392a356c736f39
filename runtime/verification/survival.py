"""What earlier rounds let expect of each running sequence's drafts. Knows no plan, no cost and no waiting draft.

A sequence's newest rounds are samples of how its next one may be: the spread between them matters, since a budget is
spent on the best of the drafts that will wait. A new sequence has none, and goes by the rates of its class; so does
what lies beyond the drafts of a round, by the rates that hold when it is asked for.

Shapes: G draft positions, D rounds kept per sequence, E rows of evidence, R sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from runtime.verification.costs import Floats, Ints

DEPTH = 32
"""Rounds kept per sequence."""
MAX_EVIDENCE = 256
"""Rows of evidence that a plan reads: many sequences need few rounds of each."""


class SurvivalBook:
    """Survival of the drafts of the newest rounds, by sequence.

    capacity: sequences remembered; those not heard of for longest go first. It should be above those that can run.
    """

    def __init__(self, gamma_max: int, *, capacity: int) -> None:
        self.gamma_max = gamma_max
        self._rows: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(capacity))
        self._survival_NDG = np.ones((capacity, DEPTH, gamma_max))
        self._count_N = np.zeros(capacity, dtype=np.int64)
        self._step_N = np.full(capacity, -1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def note(self, uids: Sequence[int], survival_RG: Floats, steps: Sequence[int]) -> None:
        """Learns of one round of each sequence, whose drafts are decided.

        survival_RG: float64 in [0, 1], not rising along G; NaN beyond what was drafted. steps: in which each one's
        drafts were drawn.
        """
        rows = np.array([self._row(uid) for uid in uids], dtype=np.int64)
        places = self._count_N[rows] % DEPTH
        self._survival_NDG[rows, places] = survival_RG
        self._count_N[rows] += 1
        self._step_N[rows] = steps

    def step_of(self, uid: int) -> int:
        """Step in which the newest drafts known of a sequence were drawn; −1 where none is."""
        row = self._rows.get(uid)
        return -1 if row is None else int(self._step_N[row])

    def evidence(self, uids: Sequence[int], prior_RG: Floats) -> tuple[Floats, Ints, float]:
        """Rows of evidence of the sequences: float64 [E, G], the sequence (from 0) that each is of, and the share of a
        sequence that each stands for.

        prior_RG: survival to go by where too few rounds of a sequence are known; above 0.
        """
        num_sequences = len(uids)
        depth = max(1, min(DEPTH, MAX_EVIDENCE // max(1, num_sequences)))
        rows = np.array([self._rows.get(uid, -1) for uid in uids], dtype=np.int64)
        count_R = np.where(rows < 0, 0, self._count_N[rows])
        # The newest `depth` rounds, newest first; in a ring they lie before the next place to write.
        back_M = np.arange(1, depth + 1)
        places_RM = (count_R[:, None] - back_M) % DEPTH
        survival_RMG = self._survival_NDG[rows[:, None], places_RM]
        unknown_RM = back_M > np.minimum(count_R, DEPTH)[:, None]
        survival_RMG = _filled(np.where(unknown_RM[..., None], np.nan, survival_RMG), prior_RG[:, None])
        of_E = np.repeat(np.arange(num_sequences), depth)
        return survival_RMG.reshape(num_sequences * depth, self.gamma_max), of_E, 1.0 / depth

    def mean(self, uids: Sequence[int], prior_G: Floats) -> Floats:
        """Mean survival by position over the newest round of each sequence that has one; [G], or [0] where none has.

        prior_G: as in `evidence`.
        """
        rows = np.array([row for uid in uids if (row := self._rows.get(uid)) is not None], dtype=np.int64)
        if not len(rows):
            return np.zeros(0)
        newest = self._survival_NDG[rows, (self._count_N[rows] - 1) % DEPTH]
        mean: Floats = _filled(newest, prior_G).mean(0)
        return mean

    def _row(self, uid: int) -> int:
        row = self._rows.get(uid)
        if row is not None:
            self._rows.move_to_end(uid)
            return row
        row = self._free.pop() if self._free else self._rows.popitem(last=False)[1]
        self._rows[uid] = row
        self._count_N[row], self._step_N[row] = 0, -1
        return row


def _filled(survival_xG: Floats, prior_xG: Floats) -> Floats:
    """Survivals with what is NaN at their ends going on from the last that is known as the prior goes on from there.
    x: any leading axes, which broadcast."""
    is_known_xG = ~np.isnan(survival_xG)
    prior_xG = np.broadcast_to(prior_xG, survival_xG.shape)
    last_x1 = is_known_xG.sum(-1, keepdims=True) - 1
    place_x1 = np.maximum(last_x1, 0)
    known_x1 = np.take_along_axis(survival_xG, place_x1, -1) / np.take_along_axis(prior_xG, place_x1, -1)
    return np.where(is_known_xG, survival_xG, prior_xG * np.where(last_x1 < 0, 1.0, known_x1))
