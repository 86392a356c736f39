"""Gated full attention of Qwen3-Next: query and gate per head, per-head norms, partial rotary, paged KV."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from state.layout import PagedKVSpec
from workers.layers.context import PassContext
from workers.models.config import Qwen3NextConfig
from workers.ops.base import Ops
from workers.ops.shared import Rotary, rms_norm


class GatedAttention:
    """`layer` numbers the KV pool it owns, `group` the cache group.

    Letters: N flat rows, D hidden, Q query heads, G key/value heads, K head width.
    """

    def __init__(
        self,
        config: Qwen3NextConfig,
        weights: Mapping[str, Tensor],
        prefix: str,
        layer: int,
        group: str,
        ops: Ops,
        rotary: Rotary,
    ) -> None:
        self._layer, self._group, self._ops, self._rotary = layer, group, ops, rotary
        self._head_dim, self._eps = config.head_dim, config.rms_norm_eps
        self._in_proj = weights[f"{prefix}in_proj.weight"]
        self._q_norm, self._k_norm = weights[f"{prefix}q_norm.weight"], weights[f"{prefix}k_norm.weight"]
        self._out_proj = weights[f"{prefix}out_proj.weight"]
        # Heads held by this rank, read off the shard rather than the configuration.
        q_width = self._out_proj.shape[1]
        kv_width = (self._in_proj.shape[0] - 2 * q_width) // 2
        self._widths = [q_width, q_width, kv_width, kv_width]

    def state_spec(self, dtype: str) -> PagedKVSpec:
        return PagedKVSpec(
            group=self._group, num_kv_heads=self._widths[2] // self._head_dim, head_dim=self._head_dim, dtype=dtype
        )

    def __call__(self, x_ND: Tensor, ctx: PassContext) -> Tensor:
        rows = x_ND.shape[0]
        q, gate, k, v = torch.split(self._ops.linear(x_ND, self._in_proj), self._widths, -1)
        q_NQK = rms_norm(q.reshape(rows, -1, self._head_dim), self._q_norm, self._eps, offset=1.0)
        k_NGK = rms_norm(k.reshape(rows, -1, self._head_dim), self._k_norm, self._eps, offset=1.0)
        q_NQK = self._rotary.rotate(q_NQK, ctx.angles)
        k_NGK = self._rotary.rotate(k_NGK, ctx.angles)
        kv, view, real = ctx.kv[self._layer], ctx.views[self._group], ctx.batch.num_real
        kv[0].index_copy_(0, view.write_N, k_NGK[:real])
        kv[1].index_copy_(0, view.write_N, v.reshape(rows, -1, self._head_dim)[:real])
        out_NQK = self._ops.attention(q_NQK, kv, ctx.batch, view)
        return self._ops.row_linear(out_NQK.reshape(rows, -1) * gate.sigmoid(), self._out_proj)
