"""How many waiting drafts of each sequence are verified in this step. Knows confidences; no tokens, no laws, no model.

The budget comes from the past; the present confidences only rank entries. Exactness rests on what an entry's admission
may depend on: the confidence of a draft is computed before that draft is drawn, so survival up to and including
position j tells nothing about draft j or anything after it, and the total order leaves nothing else to decide by.
Then draft j of a sequence is admitted by what was known before it was drawn, and the emitted tokens follow the target's
law exactly and jointly over the batch.

In numpy alone, so that what plans and simulates can run it too; ranks run its twin, `admit_on_device`.

Shapes: B sequences, G draft positions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def admit(
    confidence_BG: NDArray[np.float32],
    num_drafts_B: NDArray[np.int64],
    uid_B: NDArray[np.int64],
    budget: int,
    num_forced_B: NDArray[np.int64] | None = None,
    floor: float = 0.0,
) -> NDArray[np.int64]:
    """Lengths of the admitted prefixes: the `budget` entries of largest survival.

    Survival of entry (b, j) is the product of confidences 0 .. j, each clipped to [0, 1], NaN counting as 0; as no
    factor passes 1 it never grows along a sequence, rounding included. Entries are ranked by survival descending, then
    position ascending, then uid ascending: a total order, in which no entry precedes an earlier one of its sequence.
    Forced entries come before all others, by position and uid, and count against the budget like these.

    A budget that covers every waiting draft admits every one whose survival reaches the floor. A smaller one admits
    none of survival 0. Forced entries are admitted whatever their survival.

    confidence_BG: float32; entries at and beyond num_drafts are ignored. num_drafts_B: int64 in 0 .. G. uid_B: int64,
    distinct. budget: most entries admitted, 0 or more. num_forced_B: int64, how many entries from the front are forced,
    no more of them than there are drafts; None where none is. floor: rounded to float32. Returns int64 [B], at most
    num_drafts.
    """
    num_sequences, num_positions = confidence_BG.shape
    with np.errstate(invalid="ignore"):
        factor_BG = np.minimum(np.where(confidence_BG > 0, confidence_BG, np.float32(0)), np.float32(1))
    survival_BG = np.empty_like(factor_BG)
    running_B = np.ones(num_sequences, dtype=np.float32)
    for j in range(num_positions):
        running_B = running_B * factor_BG[:, j]
        survival_BG[:, j] = running_B
    position_BG, uid_BG = np.broadcast_arrays(np.arange(num_positions), uid_B[:, None])
    waiting_BG = position_BG < num_drafts_B[:, None]
    forced_BG = waiting_BG & (position_BG < (0 if num_forced_B is None else num_forced_B[:, None]))
    # No survival passes 1: forced entries are ahead of all others, and equal among themselves.
    ranked_by_BG = np.where(forced_BG, np.float32(2), survival_BG)
    descending_BG = np.where(waiting_BG, -ranked_by_BG, np.float32(1))
    order = np.lexsort((uid_BG.ravel(), position_BG.ravel(), descending_BG.ravel()))
    within_budget = np.empty(order.shape, dtype=np.bool_)
    within_budget[order] = np.arange(order.size) < budget
    covered = budget >= int(num_drafts_B.sum())
    good_BG = ((survival_BG > 0) | covered) & (survival_BG >= np.float32(floor))
    admitted_BG = waiting_BG & within_budget.reshape(waiting_BG.shape) & (forced_BG | good_BG)
    num_admitted_B: NDArray[np.int64] = admitted_BG.sum(axis=1, dtype=np.int64)
    return num_admitted_B
