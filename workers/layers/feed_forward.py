"""The two feed-forward kinds of Qwen3-Next: routed experts with a gated shared expert, and dense SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.experts import ExpertOwners
from workers.models.config import Qwen3NextConfig
from workers.ops.base import Experts, Ops, SharedExpert


class MixtureOfExperts:
    """softmax router over all experts in float32, top-k, renormalised where the checkpoint says so.

    Router, gate of the shared expert and the shared expert's first projection read the same input: one product.
    """

    def __init__(
        self,
        config: Qwen3NextConfig,
        weights: Mapping[str, Tensor],
        prefix: str,
        ops: Ops,
        owners: ExpertOwners | None,
    ) -> None:
        self._ops, self._top_k, self._renormalize = ops, config.experts_per_token, config.norm_topk_prob
        names = ("router", "shared_gate", "shared_gate_up")
        self._num_experts = weights[f"{prefix}router.weight"].shape[0]
        self._in_proj = torch.cat([weights[f"{prefix}{name}.weight"] for name in names])
        self._experts = Experts(
            gate_up_EOD=weights[f"{prefix}gate_up.weight"], down_EDF=weights[f"{prefix}down.weight"], owners=owners
        )
        self._shared_down = weights[f"{prefix}shared_down.weight"]

    def __call__(self, x_ND: Tensor) -> Tensor:
        fused = self._ops.linear(x_ND, self._in_proj)
        share_NE = fused[:, : self._num_experts].float().softmax(-1)
        weight_NK, expert_NK = share_NE.topk(self._top_k, -1)
        if self._renormalize:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        gate, up = fused[:, self._num_experts + 1 :].chunk(2, -1)
        shared = SharedExpert(
            inner_NF=F.silu(self._ops.dense(gate)) * up,
            down_DF=self._shared_down,
            gate_N1=self._ops.dense(fused[:, self._num_experts : self._num_experts + 1]).sigmoid(),
        )
        return self._ops.mixture(x_ND, expert_NK, weight_NK.to(x_ND.dtype), self._experts, shared)


class SwiGLU:
    """down(silu(gate x) · up x), gate and up fused into one product."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, ops: Ops) -> None:
        self._ops = ops
        self._gate_up, self._down = weights[f"{prefix}gate_up.weight"], weights[f"{prefix}down.weight"]

    def __call__(self, x_ND: Tensor) -> Tensor:
        gate, up = self._ops.linear(x_ND, self._gate_up).chunk(2, -1)
        return self._ops.row_linear(F.silu(self._ops.dense(gate)) * up, self._down)
