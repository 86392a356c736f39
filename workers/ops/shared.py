"""Row-wise operations that both numerics modes share: norms, rotary embedding, L2 normalisation. Plain torch.

Shape letters: N flat rows, H heads, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class RmsNorm:
    """x / rms(x) · (offset + weight) over the last axis, in float32, cast back to x's dtype.

    Qwen3-Next stores weight − 1 (offset 1) for all norms but the gated one (offset 0). Weights of several rows [H, D]
    scale the heads of [N, H, D] each by its own.
    """

    def __init__(self, weight: Tensor, eps: float, *, offset: float = 1.0) -> None:
        self._weight = weight.float() + offset
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        if self._weight.dim() == 1:
            return F.rms_norm(x.float(), shape, self._weight, self._eps).to(x.dtype)
        return (F.rms_norm(x.float(), shape, eps=self._eps) * self._weight).to(x.dtype)


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(Σ x² + 1e-6) over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class Rotary:
    """Rotary position embedding, half-split, on the first `rotary_dim` channels of a head (Su et al. 2104.09864).

    Angles are tabulated for positions below `max_length` once; float32.
    """

    def __init__(self, rotary_dim: int, theta: float, max_length: int, device: torch.device) -> None:
        frequencies = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))
        angles = torch.outer(torch.arange(max_length, dtype=torch.float32), frequencies)
        self._dim = rotary_dim
        self._cos = angles.cos().repeat(1, 2).to(device)
        self._sin = torch.cat([-angles.sin(), angles.sin()], 1).to(device)

    def angles(self, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin [N, 1, rotary_dim] of each row's position."""
        return self._cos.index_select(0, position_N)[:, None], self._sin.index_select(0, position_N)[:, None]

    def rotate_(self, x_NHD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates the first channels of each head in place; the others stay."""
        cos, sin = angles
        first = x_NHD[..., : self._dim]
        x = first.float()
        first.copy_(torch.addcmul(x * cos, x.roll(self._dim // 2, -1), sin))
        return x_NHD
