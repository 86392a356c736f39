"""Gated DeltaNet (Yang et al. 2412.06464) as in Qwen3-Next: short convolution, delta rule, gated norm.

Rounding schedule: projections, convolution and silu in the activations' dtype; from there q, k, v, beta, decay, state
and output in float32; one cast before the output projection. Decode, verification, prefill and fold all follow it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from state.fold import causal_conv
from state.layout import ConvSpec, GatedDeltaSpec
from workers.layers.context import PassContext
from workers.models.config import Qwen3NextConfig
from workers.ops.base import Ops
from workers.ops.shared import l2_normalize, rms_norm


class GatedDeltaNet:
    """Letters: N flat rows, D hidden, J key heads, H value heads, K key width, V value width, C channels."""

    def __init__(
        self, config: Qwen3NextConfig, weights: Mapping[str, Tensor], prefix: str, layer: int, ops: Ops
    ) -> None:
        self._layer, self._ops, self._eps = layer, ops, config.rms_norm_eps
        self._key_dim, self._value_dim = config.lin_key_dim, config.lin_value_dim
        self._in_proj = weights[f"{prefix}in_proj.weight"]
        self._conv = weights[f"{prefix}conv.weight"]
        self._out_proj = weights[f"{prefix}out_proj.weight"]
        self._norm = weights[f"{prefix}norm.weight"]
        self._dt_bias = weights[f"{prefix}dt_bias"]
        self._rate = -weights[f"{prefix}a_log"].float().exp()
        heads, channels = self._rate.shape[0], self._conv.shape[0]
        value_width = heads * self._value_dim
        self._key_width = (channels - value_width) // 2
        self._widths = [channels, value_width, heads, heads]

    def state_specs(self, dtype: str) -> tuple[ConvSpec, GatedDeltaSpec]:
        channels, _, heads, _ = self._widths
        conv = ConvSpec(channels=channels, width=self._conv.shape[1], dtype=dtype)
        delta = GatedDeltaSpec(
            num_key_heads=self._key_width // self._key_dim,
            num_value_heads=heads,
            key_dim=self._key_dim,
            value_dim=self._value_dim,
        )
        return conv, delta

    def __call__(self, x_ND: Tensor, ctx: PassContext) -> Tensor:
        batch, txn, rows = ctx.batch, ctx.txn, x_ND.shape[0]
        assert txn is not None
        raw_NC, z, b_NH, a_NH = torch.split(self._ops.linear(x_ND, self._in_proj), self._widths, -1)
        txn.record_conv(self._layer, raw_NC)
        mixed = [
            causal_conv(txn.conv_window(self._layer, i), bucket.gather(raw_NC), self._conv)
            for i, bucket in enumerate(batch.buckets)
        ]
        mixed_NC = F.silu(batch.scatter(mixed)).float()
        q, k, v = torch.split(mixed_NC, [self._key_width, self._key_width, self._widths[1]], -1)
        q_NJK = l2_normalize(q.reshape(rows, -1, self._key_dim)) * self._key_dim**-0.5
        k_NJK = l2_normalize(k.reshape(rows, -1, self._key_dim))
        v_NHV = v.reshape(rows, -1, self._value_dim)
        beta_NH = b_NH.float().sigmoid()
        log_decay_NH = self._rate * F.softplus(a_NH.float() + self._dt_bias)
        txn.record_delta(self._layer, k_NJK, v_NHV, beta_NH, log_decay_NH)
        parts = []
        for i, bucket in enumerate(batch.buckets):
            out, state = self._ops.delta_outputs(
                txn.recurrent(self._layer, i),
                bucket.gather(q_NJK),
                bucket.gather(k_NJK),
                bucket.gather(v_NHV),
                bucket.gather(beta_NH),
                bucket.gather(log_decay_NH),
                bucket.counts_B,
            )
            if bucket.is_wide:
                txn.record_advance(self._layer, i, state)
            parts.append(out)
        out_NHV = rms_norm(batch.scatter(parts), self._norm, self._eps, offset=0.0)
        out_NHV = out_NHV * F.silu(z.float()).reshape(out_NHV.shape)
        return self._ops.row_linear(out_NHV.reshape(rows, -1).to(x_ND.dtype), self._out_proj)
