"""Padding of row tensors to what the numerics in force ask for. Pure."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def pad_rows(x_R: Tensor, multiple: int) -> Tensor:
    """Zero rows are appended until the first axis is a multiple of `multiple`."""
    missing = -x_R.shape[0] % multiple
    return F.pad(x_R, (0, 0) * (x_R.dim() - 1) + (0, missing)) if missing else x_R
