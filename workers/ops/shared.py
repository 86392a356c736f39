"""Row-wise operations that both numerics modes share: norms, rotary embedding, L2 normalisation. Plain torch.

Shape letters: N flat rows, H heads, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float) -> Tensor:
    """x / rms(x) · (offset + weight) over the last axis, in float32, cast back to x's dtype.

    Qwen3-Next stores weight − 1 (offset 1) for all norms but the gated one (offset 0).
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * (weight.float() + offset)).to(x.dtype)


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
        self._half = rotary_dim // 2
        self._cos, self._sin = angles.cos().to(device), angles.sin().to(device)

    def angles(self, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, rotary_dim / 2] of each row's position."""
        return self._cos.index_select(0, position_N)[:, None], self._sin.index_select(0, position_N)[:, None]

    def rotate(self, x_NHD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates the first channels of each head; the others pass."""
        cos, sin = angles
        x = x_NHD.float()
        a, b, rest = x[..., : self._half], x[..., self._half : 2 * self._half], x[..., 2 * self._half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x_NHD.dtype)
