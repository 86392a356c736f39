"""Gated full attention of Qwen3-Next: query and gate per head, per-head norms, partial rotary, paged KV."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from state.layout import PagedKVSpec
from workers.layers.context import PassContext
from workers.models.config import Qwen3NextConfig
from workers.ops.base import Ops
from workers.ops.shared import RmsNorm, Rotary


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
        self._head_dim = config.head_dim
        self._in_proj = weights[f"{prefix}in_proj.weight"]
        self._out_proj = weights[f"{prefix}out_proj.weight"]
        # Heads held by this rank, read off the shard rather than the configuration.
        self._num_q = self._out_proj.shape[1] // self._head_dim
        self._num_kv = (self._in_proj.shape[0] // self._head_dim - 2 * self._num_q) // 2
        q_norm, k_norm = weights[f"{prefix}q_norm.weight"], weights[f"{prefix}k_norm.weight"]
        per_head = torch.cat([q_norm.expand(self._num_q, -1), k_norm.expand(self._num_kv, -1)])
        self._qk_norm = RmsNorm(per_head, config.rms_norm_eps)

    def state_spec(self, dtype: str) -> PagedKVSpec:
        return PagedKVSpec(group=self._group, num_kv_heads=self._num_kv, head_dim=self._head_dim, dtype=dtype)

    def __call__(self, x_ND: Tensor, ctx: PassContext) -> Tensor:
        num_qk = self._num_q + self._num_kv
        fused_NHK = self._ops.linear(x_ND, self._in_proj).view(x_ND.shape[0], 2 * num_qk, self._head_dim)
        qk_NHK = self._rotary.rotate_(self._qk_norm(fused_NHK[:, :num_qk]), ctx.angles)
        v_NGK = fused_NHK[:, num_qk : num_qk + self._num_kv]
        gate_NQK = fused_NHK[:, num_qk + self._num_kv :]
        kv, view, real = ctx.kv[self._layer], ctx.views[self._group], ctx.batch.num_real
        kv[0].index_copy_(0, view.write_N, qk_NHK[:real, self._num_q :])
        kv[1].index_copy_(0, view.write_N, v_NGK[:real])
        out_NQK = view.attend(qk_NHK[:, : self._num_q], kv) * self._ops.dense(gate_NQK).sigmoid()
        return self._ops.row_linear(out_NQK.flatten(1), self._out_proj)
