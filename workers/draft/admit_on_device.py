"""`admit` on tensors, where the confidences wait. Knows what that one knows.

Shapes: B sequences, G draft positions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def admit_on_device(
    confidence_BG: Tensor,
    num_drafts_B: Tensor,
    uid_B: Tensor,
    budget: int,
    num_forced_B: Tensor | None = None,
    floor: float = 0.0,
) -> Tensor:
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
    position_G1 = torch.arange(num_positions, device=device).unsqueeze(1)
    waiting_GB = position_G1 < num_drafts_B[by_uid_B]
    ranked_by_GB = torch.where(waiting_GB, survival_GB, -1.0)
    # Rounded here, where kernels cannot differ in it.
    good_GB = ((survival_GB > 0) | (num_drafts_B.sum() <= budget)) & (survival_GB >= float(np.float32(floor)))
    if num_forced_B is not None:
        forced_GB = waiting_GB & (position_G1 < num_forced_B[by_uid_B])
        ranked_by_GB = torch.where(forced_GB, 2.0, ranked_by_GB)
        good_GB = good_GB | forced_GB
    order = ranked_by_GB.flatten().argsort(stable=True, descending=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=device))
    admitted_GB = waiting_GB & (rank.view_as(waiting_GB) < budget) & good_GB
    return torch.zeros_like(num_drafts_B).scatter_(0, by_uid_B, admitted_GB.sum(dim=0))
