"""How many waiting drafts of each sequence are verified in this step. Knows confidences; no tokens, no laws, no model.

The budget comes from the past; the present confidences only rank entries. Exactness rests on what an entry's admission
may depend on: the confidence of a draft is computed before that draft is drawn, so survival up to and including
position j tells nothing about draft j or anything after it, and the total order leaves nothing else to decide by.
Then draft j of a sequence is admitted by what was known before it was drawn, and the emitted tokens follow the target's
law exactly and jointly over the batch.

Shapes: B sequences, G draft positions, R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def confidence(top_R: Tensor, log_mass_R: Tensor) -> Tensor:
    """How sure the drafter is of its next draft: the largest probability of its law, before the draft is drawn.

    Of the law at temperature 1 and without cuts: the law a greedy row is sampled from is a point mass and would rank
    all its drafts alike. Never the probability of the token drawn: admission would then favour some tokens over others
    and bias the output.

    top_R, log_mass_R: float32, the largest logit and the logarithm of the sum of all their exponentials.
    Returns float32 [R] in (0, 1].
    """
    return torch.exp(top_R - log_mass_R).clamp(max=1.0)


def admit(
    confidence_BG: NDArray[np.float32], num_drafts_B: NDArray[np.int64], uid_B: NDArray[np.int64], budget: int
) -> NDArray[np.int64]:
    """Lengths of the admitted prefixes: the `budget` entries of largest survival.

    Survival of entry (b, j) is the product of confidences 0 .. j, each clipped to [0, 1], NaN counting as 0; as no
    factor passes 1 it never grows along a sequence, rounding included. Entries are ranked by survival descending, then
    position ascending, then uid ascending: a total order, in which no entry precedes an earlier one of its sequence.

    A budget that covers every waiting draft admits every one. A smaller one admits none of survival 0.

    confidence_BG: float32; entries at and beyond num_drafts are ignored. num_drafts_B: int64 in 0 .. G. uid_B: int64,
    distinct. budget: most entries admitted, 0 or more. Returns int64 [B], at most num_drafts.
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
    descending_BG = np.where(waiting_BG, -survival_BG, np.float32(1))
    order = np.lexsort((uid_BG.ravel(), position_BG.ravel(), descending_BG.ravel()))
    within_budget = np.empty(order.shape, dtype=np.bool_)
    within_budget[order] = np.arange(order.size) < budget
    covered = budget >= int(num_drafts_B.sum())
    admitted_BG = waiting_BG & within_budget.reshape(waiting_BG.shape) & ((survival_BG > 0) | covered)
    num_admitted_B: NDArray[np.int64] = admitted_BG.sum(axis=1, dtype=np.int64)
    return num_admitted_B


def admit_on_device(confidence_BG: Tensor, num_drafts_B: Tensor, uid_B: Tensor, budget: int) -> Tensor:
    """`admit` on tensors of the same shapes and dtypes, with equal results bit for bit and no host synchronisation.

    Survival is multiplied up one position at a time, as there: a parallel scan would associate, and so round, in
    another order. The number of torch calls depends on G alone.
    """
    num_sequences, num_positions = confidence_BG.shape
    device = confidence_BG.device
    # `where` maps NaN, negative numbers and −0 to +0 at once; a radix sort may tell the zeros apart.
    factor_BG = torch.where(confidence_BG > 0, confidence_BG, 0.0).clamp(max=1.0)
    survivals = []
    running_B = torch.ones(num_sequences, dtype=torch.float32, device=device)
    for j in range(num_positions):
        running_B = running_B * factor_BG[:, j]
        survivals.append(running_B)
    if not survivals:
        return torch.zeros_like(num_drafts_B)
    # Laid out position by position with uids ascending, a stable sort by survival breaks ties by position, then uid.
    by_uid_B = uid_B.argsort()
    survival_GB = torch.stack(survivals)[:, by_uid_B]
    waiting_GB = torch.arange(num_positions, device=device).unsqueeze(1) < num_drafts_B[by_uid_B]
    order = torch.where(waiting_GB, survival_GB, -1.0).flatten().argsort(stable=True, descending=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=device))
    covered = num_drafts_B.sum() <= budget
    admitted_GB = waiting_GB & (rank.view_as(waiting_GB) < budget) & ((survival_GB > 0) | covered)
    return torch.zeros_like(num_drafts_B).scatter_(0, by_uid_B, admitted_GB.sum(dim=0))
