"""Gated DeltaNet (Yang et al. 2412.06464) as in Qwen3-Next: short convolution, delta rule, gated norm.

Rounding schedule: projections, convolution and silu in the activations' dtype; from there q, k, v, beta, decay, state
and output in float32; one cast before the output projection. Decode, verification, prefill and fold all follow it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from state.fold import DeltaInputs, causal_conv
from state.layout import ConvSpec, GatedDeltaSpec
from workers.batch import Bucket
from workers.layers.context import PassContext
from workers.models.config import Qwen3NextConfig
from workers.ops.base import Ops
from workers.ops.shared import RmsNorm, l2_normalize


class GatedDeltaNet:
    """Letters: N flat rows, D hidden, J key heads, H value heads, K key width, V value width, C channels."""

    def __init__(
        self, config: Qwen3NextConfig, weights: Mapping[str, Tensor], prefix: str, layer: int, ops: Ops
    ) -> None:
        self._layer, self._ops = layer, ops
        self._key_dim, self._value_dim = config.lin_key_dim, config.lin_value_dim
        self._in_proj = weights[f"{prefix}in_proj.weight"]
        self._out_proj = weights[f"{prefix}out_proj.weight"]
        self._taps = weights[f"{prefix}conv.weight"].t().contiguous()
        self._norm = RmsNorm(weights[f"{prefix}norm.weight"], config.rms_norm_eps, offset=0.0)
        self._dt_bias = weights[f"{prefix}dt_bias"]
        self._rate = -weights[f"{prefix}a_log"].float().exp()
        # Heads held by this rank, read off the shard rather than the configuration.
        self._num_values = self._rate.shape[0]
        self._channels = self._taps.shape[1]
        self._num_keys = (self._channels - self._num_values * self._value_dim) // (2 * self._key_dim)

    def state_specs(self, dtype: str) -> tuple[ConvSpec, GatedDeltaSpec]:
        conv = ConvSpec(channels=self._channels, width=self._taps.shape[0], dtype=dtype)
        delta = GatedDeltaSpec(
            num_key_heads=self._num_keys,
            num_value_heads=self._num_values,
            key_dim=self._key_dim,
            value_dim=self._value_dim,
        )
        return conv, delta

    def __call__(self, x_ND: Tensor, ctx: PassContext) -> Tensor:
        batch, txn, rows = ctx.batch, ctx.txn, x_ND.shape[0]
        assert txn is not None
        heads = self._num_values
        fused = self._ops.linear(x_ND, self._in_proj)
        raw_NC = fused[:, : self._channels]
        z_NHV = fused[:, self._channels : -2 * heads].view(rows, heads, self._value_dim)
        txn.record_conv(self._layer, raw_NC)
        mixed = [
            causal_conv(txn.conv_window(self._layer, i), bucket.gather(raw_NC), self._taps)
            for i, bucket in enumerate(batch.buckets)
        ]
        mixed_NC = F.silu(batch.scatter(mixed)).float()
        qk_NJK = l2_normalize(
            mixed_NC[:, : 2 * self._num_keys * self._key_dim].view(rows, 2 * self._num_keys, self._key_dim)
        )
        q_NJK = qk_NJK[:, : self._num_keys] * self._key_dim**-0.5
        inputs = DeltaInputs(
            k=qk_NJK[:, self._num_keys :],
            v=mixed_NC[:, 2 * self._num_keys * self._key_dim :].view(rows, heads, self._value_dim),
            beta=self._ops.dense(fused[:, -2 * heads : -heads]).float().sigmoid(),
            log_decay=self._rate * F.softplus(fused[:, -heads:].float() + self._dt_bias),
        )
        txn.record_delta(self._layer, inputs)
        parts = []
        for i, bucket in enumerate(batch.buckets):
            out, state = self._ops.delta_outputs(
                txn.recurrent(self._layer, i),
                bucket.gather(q_NJK),
                gather_inputs(bucket, inputs),
                bucket.counts_B,
                advance=bucket.is_wide,
            )
            if bucket.is_wide:
                txn.record_advance(self._layer, i, state)
            parts.append(out)
        out_NHV = self._norm(batch.scatter(parts)) * F.silu(self._ops.dense(z_NHV).float())
        return self._ops.row_linear(out_NHV.flatten(1).to(x_ND.dtype), self._out_proj)


def gather_inputs(bucket: Bucket, inputs: DeltaInputs) -> DeltaInputs:
    """Flat rows to the cells of a bucket."""
    return DeltaInputs(
        k=bucket.gather(inputs.k),
        v=bucket.gather(inputs.v),
        beta=bucket.gather(inputs.beta),
        log_decay=bucket.gather(inputs.log_decay),
    )
