"""The recurrences as pure functions on tensors: Gated DeltaNet in two forms, and the causal convolution's window.

The forward pass and the commit use the *same* functions, so that what a fold leaves behind is what decoding token by
token would have left. Knows no pools, no models.

Shape letters: B sequences, W window (rows of one pass), J key heads, H value heads, K key width, V value width,
C channels, T taps of the convolution.

Rows that must not count (padding, rejected drafts) enter with beta = 0 and log_decay = 0: they do not change the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
"""Rows per triangular solve of the chunked form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInputs:
    """Raw inputs of the recurrence, W rows for each of B sequences, float32. Value head h uses key head ⌊h·J/H⌋.

    k [B, W, J, K] normalised, v [B, W, H, V], beta [B, W, H] in (0, 1), log_decay [B, W, H] ≤ 0.
    """

    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor

    @property
    def width(self) -> int:
        return self.k.shape[1]

    def only_first(self, counts_B: Tensor) -> DeltaInputs:
        """Rows at or beyond counts become steps that change nothing."""
        counted = (torch.arange(self.width, device=counts_B.device) < counts_B[:, None])[..., None]
        return DeltaInputs(k=self.k, v=self.v, beta=self.beta * counted, log_decay=self.log_decay * counted)

    def for_value_heads(self, x_BWJK: Tensor) -> Tensor:
        """Key heads repeated so that each value head has its own."""
        share = self.v.shape[2] // x_BWJK.shape[2]
        return x_BWJK if share == 1 else x_BWJK.repeat_interleave(share, 2)


def gated_delta_steps(
    state_BHKV: Tensor, q_BWJK: Tensor | None, inputs: DeltaInputs, decay_BWH: Tensor, counts_B: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Token by token: S ← decay·S; S ← S + k (β (v − Sᵀk))ᵀ; o = Sᵀq  (Yang et al. 2412.06464, eq. 10).

    Products are element-wise and sums run over K, so a sequence's bits do not depend on its neighbours. Steps at or
    beyond `counts_B` leave a sequence's state untouched bit for bit. decay_BWH: exp(log_decay). `q` None skips the
    outputs. Returns outputs [B, W, H, V] (or None) and the state after `counts_B` steps.
    """
    k_BWHK = inputs.for_value_heads(inputs.k)
    q_BWHK = None if q_BWJK is None else inputs.for_value_heads(q_BWJK)
    outputs = []
    for i in range(inputs.width):
        k_BHK1 = k_BWHK[:, i, :, :, None]
        decayed = state_BHKV * decay_BWH[:, i, :, None, None]
        delta_BHV = inputs.beta[:, i, :, None] * (inputs.v[:, i] - (decayed * k_BHK1).sum(2))
        updated = decayed + k_BHK1 * delta_BHV[:, :, None, :]
        if q_BWHK is not None:
            outputs.append((updated * q_BWHK[:, i, :, :, None]).sum(2))
        state_BHKV = torch.where((i < counts_B)[:, None, None, None], updated, state_BHKV)
    return (torch.stack(outputs, 1) if outputs else None), state_BHKV


def gated_delta_chunks(
    state_BHKV: Tensor, q_BWJK: Tensor | None, inputs: DeltaInputs, *, advance: bool = True
) -> tuple[Tensor | None, Tensor]:
    """The same recurrence in chunks (WY form): a few matrix products and one triangular solve per CHUNK rows.

    With G the running sum of log_decay and D_ij = exp(G_i − G_j):
        (I + tril(β k kᵀ ∘ D, −1)) U = β (v − exp(G) S₀ᵀk)      o = exp(G) S₀ᵀq + tril(q kᵀ ∘ D) U
        S = exp(G_last) S₀ + Σ_j exp(G_last − G_j) k_j u_jᵀ
    (2412.06464 §3.3.) Equal to `gated_delta_steps` up to rounding. Arguments and results as there. `advance` False
    leaves out the state after the last chunk: what is returned in its place is the state before it.
    """
    k_BHWK = inputs.for_value_heads(inputs.k).transpose(1, 2)
    q_BHWK = None if q_BWJK is None else inputs.for_value_heads(q_BWJK).transpose(1, 2)
    v_BHWV = inputs.v.transpose(1, 2)
    beta_BHW1 = inputs.beta.transpose(1, 2)[..., None]
    log_decay_BHW = inputs.log_decay.transpose(1, 2)
    if inputs.width <= CHUNK:
        out, state_BHKV = _one_chunk(state_BHKV, q_BHWK, k_BHWK, v_BHWV, beta_BHW1, log_decay_BHW, advance)
        return (None if out is None else out.transpose(1, 2)), state_BHKV
    outputs = []
    for start in range(0, inputs.width, CHUNK):
        rows = slice(start, start + CHUNK)
        out, state_BHKV = _one_chunk(
            state_BHKV,
            None if q_BHWK is None else q_BHWK[:, :, rows],
            k_BHWK[:, :, rows],
            v_BHWV[:, :, rows],
            beta_BHW1[:, :, rows],
            log_decay_BHW[:, :, rows],
            advance or start + CHUNK < inputs.width,
        )
        if out is not None:
            outputs.append(out)
    return (torch.cat(outputs, 2).transpose(1, 2) if outputs else None), state_BHKV


def _one_chunk(
    state: Tensor, q: Tensor | None, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, advance: bool
) -> tuple[Tensor | None, Tensor]:
    """`gated_delta_chunks` for one chunk; heads before rows, beta with a trailing axis of 1."""
    total = log_decay.cumsum(-1)
    gain = total.exp()[..., None]
    u = beta * torch.addcmul(v, gain, k @ state, value=-1)
    several = k.shape[2] > 1
    if several:
        # Clamping the upper triangle before exp keeps it finite; tril drops it afterwards.
        between = (total[..., :, None] - total[..., None, :]).clamp_(max=0).exp_()
        system = ((k * beta) @ k.transpose(-1, -2)).mul_(between).tril_(-1)
        u = torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
    out = None
    if q is not None:
        scores = q @ k.transpose(-1, -2)
        out = torch.addcmul(scores.mul_(between).tril_() @ u if several else scores * u, gain, q @ state)
    if not advance:
        return out, state
    carried = k * (total[..., -1:] - total).exp()[..., None] if several else k
    return out, torch.addcmul(carried.transpose(-1, -2) @ u, state, gain[..., -1:, :])


def causal_conv(window_BTC: Tensor, raw_BWC: Tensor, taps_TC: Tensor) -> Tensor:
    """Depthwise causal convolution of `raw` preceded by the stored window of T − 1 rows; no activation. [B, W, C].

    taps_TC: one contiguous row per tap, the oldest first; summed in that order, each element by itself, in the inputs'
    dtype.
    """
    width = raw_BWC.shape[1]
    joined = torch.cat([window_BTC, raw_BWC], 1)
    out = joined[:, :width] * taps_TC[0]
    for tap in range(1, taps_TC.shape[0]):
        out.addcmul_(joined[:, tap : tap + width], taps_TC[tap])
    return out


def advance_conv_window(window_BTC: Tensor, raw_BWC: Tensor, counts_B: Tensor) -> Tensor:
    """Window after `counts_B` rows: the last T − 1 rows of the old window followed by raw[:counts]."""
    joined = torch.cat([window_BTC, raw_BWC], 1)
    index = counts_B[:, None] + torch.arange(window_BTC.shape[1], device=raw_BWC.device)
    return joined.gather(1, index[..., None].expand(-1, -1, joined.shape[2]))
