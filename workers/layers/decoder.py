"""One decoder layer: x += mixer(norm x); x += feed_forward(norm x)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from parallel.experts import ExpertOwners
from state.layout import StateSpec
from workers.layers.attention import GatedAttention
from workers.layers.context import PassContext
from workers.layers.feed_forward import MixtureOfExperts, SwiGLU
from workers.layers.gated_delta import GatedDeltaNet
from workers.models.config import Qwen3NextConfig
from workers.ops.base import Ops
from workers.ops.shared import RmsNorm, Rotary


class DecoderLayer:
    """`layer` numbers the state it owns. `attends`: gated attention or Gated DeltaNet. `dense`: SwiGLU or experts."""

    def __init__(
        self,
        config: Qwen3NextConfig,
        weights: Mapping[str, Tensor],
        prefix: str,
        *,
        layer: int,
        group: str,
        attends: bool,
        dense: bool,
        ops: Ops,
        rotary: Rotary,
        owners: ExpertOwners | None,
    ) -> None:
        self._input_norm = RmsNorm(weights[f"{prefix}input_norm.weight"], config.rms_norm_eps)
        self._post_norm = RmsNorm(weights[f"{prefix}post_norm.weight"], config.rms_norm_eps)
        self._mixer: GatedAttention | GatedDeltaNet
        if attends:
            self._mixer = GatedAttention(config, weights, f"{prefix}mixer.", layer, group, ops, rotary)
        else:
            self._mixer = GatedDeltaNet(config, weights, f"{prefix}mixer.", layer, ops)
        self._feed_forward = (
            SwiGLU(weights, f"{prefix}mlp.", ops)
            if dense
            else MixtureOfExperts(config, weights, f"{prefix}mlp.", ops, owners)
        )

    def state_specs(self, dtype: str) -> tuple[StateSpec, ...]:
        if isinstance(self._mixer, GatedAttention):
            return (self._mixer.state_spec(dtype),)
        return self._mixer.state_specs(dtype)

    def __call__(self, x_ND: Tensor, ctx: PassContext) -> Tensor:
        x_ND = x_ND + self._mixer(self._input_norm(x_ND), ctx)
        return x_ND + self._feed_forward(self._post_norm(x_ND))
