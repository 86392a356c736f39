"""The recurrences as pure functions on tensors: Gated DeltaNet in two forms, and the causal convolution's window.

The forward pass and the commit use the *same* functions, so that what a fold leaves behind is what decoding token by
token would have left. Knows no pools, no models.

Shape letters: B sequences, W window (rows of one pass), H value heads, K key width, V value width, C channels,
T taps of the convolution.

Rows that must not count (padding, rejected drafts) enter with beta = 0 and log_decay = 0: they leave the state as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
"""Rows per triangular solve of the chunked form."""


def gated_delta_steps(
    state_BHKV: Tensor, q_BWHK: Tensor | None, k_BWHK: Tensor, v_BWHV: Tensor, beta_BWH: Tensor, decay_BWH: Tensor, counts_B: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Token by token: S ← decay·S; S ← S + k (β (v − Sᵀk))ᵀ; o = Sᵀq  (Yang et al. 2412.06464, eq. 10).

    All float32; products are element-wise and sums run over K, so a sequence's bits do not depend on its neighbours.
    Steps at or beyond `counts_B` leave a sequence's state untouched bit for bit. `q` None skips the outputs.
    Returns outputs [B, W, H, V] (or None) and the state after `counts_B` steps.
    """
    outputs = []
    for i in range(k_BWHK.shape[1]):
        k_BHK1 = k_BWHK[:, i, :, :, None]
        decayed = state_BHKV * decay_BWH[:, i, :, None, None]
        delta_BHV = beta_BWH[:, i, :, None] * (v_BWHV[:, i] - (decayed * k_BHK1).sum(2))
        updated = decayed + k_BHK1 * delta_BHV[:, :, None, :]
        if q_BWHK is not None:
            outputs.append((updated * q_BWHK[:, i, :, :, None]).sum(2))
        state_BHKV = torch.where((i < counts_B)[:, None, None, None], updated, state_BHKV)
    return (torch.stack(outputs, 1) if outputs else None), state_BHKV


def gated_delta_chunks(
    state_BHKV: Tensor, q_BWHK: Tensor | None, k_BWHK: Tensor, v_BWHV: Tensor, beta_BWH: Tensor, log_decay_BWH: Tensor
) -> tuple[Tensor | None, Tensor]:
    """The same recurrence in chunks (WY form): a few matrix products and one triangular solve per CHUNK rows.

    With G the running sum of log_decay and D_ij = exp(G_i − G_j):
        (I + tril(β k kᵀ ∘ D, −1)) U = β (v − exp(G) S₀ᵀk)      o = exp(G) S₀ᵀq + tril(q kᵀ ∘ D) U
        S = exp(G_last) S₀ + Σ_j exp(G_last − G_j) k_j u_jᵀ
    (2412.06464 §3.3.) Equal to `gated_delta_steps` up to rounding. All float32. Arguments and results as there; rows
    that must not count carry beta = 0 and log_decay = 0.
    """
    outputs = []
    for start in range(0, k_BWHK.shape[1], CHUNK):
        rows = slice(start, start + CHUNK)
        k = k_BWHK[:, rows].transpose(1, 2)
        v = v_BWHV[:, rows].transpose(1, 2)
        beta = beta_BWH[:, rows].transpose(1, 2)
        total = log_decay_BWH[:, rows].transpose(1, 2).cumsum(-1)
        gain = total.exp()
        u = beta[..., None] * (v - gain[..., None] * (k @ state_BHKV))
        width = k.shape[2]
        if width > 1:
            # Clamping the upper triangle before exp keeps it finite; tril drops it afterwards.
            between = (total[..., :, None] - total[..., None, :]).clamp(max=0).exp()
            system = ((k * beta[..., None]) @ k.transpose(-1, -2) * between).tril(-1)
            u = torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
        if q_BWHK is not None:
            q = q_BWHK[:, rows].transpose(1, 2)
            out = gain[..., None] * (q @ state_BHKV)
            scores = q @ k.transpose(-1, -2)
            out = out + (scores * between).tril() @ u if width > 1 else out + scores * u
            outputs.append(out.transpose(1, 2))
        remaining = (total[..., -1:] - total).exp()
        state_BHKV = gain[..., -1, None, None] * state_BHKV + (k * remaining[..., None]).transpose(-1, -2) @ u
    if not outputs:
        return None, state_BHKV
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)), state_BHKV


def causal_conv(window_BTC: Tensor, raw_BWC: Tensor, weight_CT: Tensor) -> Tensor:
    """Depthwise causal convolution of `raw` preceded by the stored window of T − 1 rows. Returns [B, W, C], no activation.

    The taps are summed oldest first, element by element, in the dtype of the inputs.
    """
    width = raw_BWC.shape[1]
    joined = torch.cat([window_BTC, raw_BWC], 1)
    out = joined[:, :width] * weight_CT[:, 0]
    for tap in range(1, weight_CT.shape[1]):
        out = out + joined[:, tap : tap + width] * weight_CT[:, tap]
    return out


def advance_conv_window(window_BTC: Tensor, raw_BWC: Tensor, counts_B: Tensor) -> Tensor:
    """Window after `counts_B` rows: the last T − 1 rows of the old window followed by raw[:counts]."""
    joined = torch.cat([window_BTC, raw_BWC], 1)
    index = counts_B[:, None] + torch.arange(window_BTC.shape[1], device=raw_BWC.device)
    return joined.gather(1, index[..., None].expand(-1, -1, joined.shape[2]))
