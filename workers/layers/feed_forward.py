"""The two feed-forward kinds of Qwen3-Next: routed experts with a gated shared expert, and dense SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from workers.models.config import Qwen3NextConfig
from workers.ops.base import Ops


class MixtureOfExperts:
    """softmax router over all experts in float32, top-k, renormalised where the checkpoint says so."""

    def __init__(self, config: Qwen3NextConfig, weights: Mapping[str, Tensor], prefix: str, ops: Ops) -> None:
        self._ops, self._top_k, self._renormalize = ops, config.experts_per_token, config.norm_topk_prob
        self._router = weights[f"{prefix}router.weight"]
        self._gate_up, self._down = weights[f"{prefix}gate_up.weight"], weights[f"{prefix}down.weight"]
        self._shared = SwiGLU(weights, f"{prefix}shared_", ops)
        self._shared_gate = weights[f"{prefix}shared_gate.weight"]

    def __call__(self, x_ND: Tensor) -> Tensor:
        share_NE = self._ops.linear(x_ND, self._router).float().softmax(-1)
        weight_NK, expert_NK = share_NE.topk(self._top_k, -1)
        if self._renormalize:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        routed = self._ops.experts(x_ND, expert_NK, weight_NK.to(x_ND.dtype), self._gate_up, self._down)
        return routed + self._shared(x_ND) * self._ops.linear(x_ND, self._shared_gate).sigmoid()


class SwiGLU:
    """down(silu(gate x) · up x), gate and up fused into one product."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, ops: Ops) -> None:
        self._ops = ops
        self._gate_up, self._down = weights[f"{prefix}gate_up.weight"], weights[f"{prefix}down.weight"]

    def __call__(self, x_ND: Tensor) -> Tensor:
        gate, up = self._ops.linear(x_ND, self._gate_up).chunk(2, -1)
        return self._ops.row_linear(F.silu(gate) * up, self._down)
