"""Qwen3-Next: the target, and the MTP head that drafts beside it. Knows no scheduling and no sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.experts import ExpertOwners
from parallel.rendezvous import RankGroups
from parallel.vocabulary import Vocabulary
from state.layout import DRAFTER_GROUP, TARGET_GROUP, StateLayout
from workers.layers.context import PassContext
from workers.layers.decoder import DecoderLayer
from workers.models.config import Qwen3NextConfig
from workers.ops.base import Ops
from workers.ops.shared import RmsNorm, Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """What a pass yields per flat row, [N, D]: for the output head and for the drafter. Equal in this family."""

    for_logits: Tensor
    for_draft: Tensor


class Qwen3Next:
    """Target and, where the checkpoint has one and it is wanted, its MTP module.

    `weights` maps our parameter names to this rank's tensors; see qwen3_next_table. `max_length` bounds positions.
    owners: of whole experts, where ranks hold such.
    """

    def __init__(
        self,
        config: Qwen3NextConfig,
        weights: Mapping[str, Tensor],
        ops: Ops,
        groups: RankGroups,
        *,
        max_length: int,
        drafts: bool,
    ) -> None:
        self.config = config
        self._ops = ops
        self._embed = weights["embed.weight"]
        self._head = self._embed if config.tied else weights["lm_head.weight"]
        self.vocabulary = Vocabulary(config.vocab_size, groups.tp)
        spreads = groups.mesh.spreads_experts and config.num_experts > 0
        self.owners = ExpertOwners(config.num_experts, groups.world, self._embed.device) if spreads else None
        self._norm = RmsNorm(weights["norm.weight"], config.rms_norm_eps)
        self.rotary = Rotary(config.rotary_dim, config.rope_theta, max_length, self._embed.device)
        self.layers = [
            DecoderLayer(
                config,
                weights,
                f"layers.{i}.",
                layer=i,
                group=TARGET_GROUP,
                attends=kind == "full_attention",
                dense=i in config.dense_layers,
                ops=ops,
                rotary=self.rotary,
                owners=self.owners,
            )
            for i, kind in enumerate(config.layer_types)
        ]
        self.drafter = MtpModule(config, weights, ops, self.rotary, self.owners) if drafts else None

    @property
    def device(self) -> torch.device:
        return self._embed.device

    @property
    def state_layout(self) -> StateLayout:
        dtype = str(self._embed.dtype).removeprefix("torch.")
        layers = [*self.layers, self.drafter.layer] if self.drafter else self.layers
        return StateLayout(
            layers=tuple(layer.state_specs(dtype) for layer in layers),
            hidden_size=self.config.hidden_size,
            vocab_size=self.config.vocab_size,
            activation_dtype=dtype,
        )

    def embed(self, ids_N: Tensor) -> Tensor:
        return self.vocabulary.embed(ids_N, self._embed)

    def forward(self, ids_N: Tensor, ctx: PassContext) -> Hidden:
        """ids int64 [N] → post-final-norm hidden states, which the head and the drafter both take."""
        x_ND = self.embed(ids_N)
        for layer in self.layers:
            x_ND = layer(x_ND, ctx)
        hidden = self._norm(x_ND)
        return Hidden(for_logits=hidden, for_draft=hidden)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """[R, D] → float32 [R, P]: this rank's columns of the vocabulary; see `vocabulary` for those of all."""
        return self.vocabulary.without_padding(self._ops.linear(hidden_RD, self._head).float())


class MtpModule:
    """h'_p = norm(layer(fc [norm(embed(x_{p+1})); norm(h_p)])), DeepSeek-V3 (2412.19437) eq. 21 with one layer of gated
    attention. Chained: a step's output is the next step's h. Its KV, one entry a position, is a cache group of its
    own."""

    def __init__(
        self,
        config: Qwen3NextConfig,
        weights: Mapping[str, Tensor],
        ops: Ops,
        rotary: Rotary,
        owners: ExpertOwners | None,
    ) -> None:
        self._ops = ops
        self._embed_norm = RmsNorm(weights["mtp.embed_norm.weight"], config.rms_norm_eps)
        self._hidden_norm = RmsNorm(weights["mtp.hidden_norm.weight"], config.rms_norm_eps)
        self._norm = RmsNorm(weights["mtp.norm.weight"], config.rms_norm_eps)
        self._fc = weights["mtp.fc.weight"]
        self._confidence_weight = weights.get("mtp.confidence.weight")
        self._confidence_bias = weights.get("mtp.confidence.bias")
        self.layer = DecoderLayer(
            config,
            weights,
            "mtp.layer.",
            layer=config.num_layers,
            group=DRAFTER_GROUP,
            attends=True,
            dense=False,
            ops=ops,
            rotary=rotary,
            owners=owners,
        )

    def forward(self, embedding_ND: Tensor, hidden_ND: Tensor, ctx: PassContext) -> Hidden:
        """Embedding of the token after each row's position, and the hidden state at it."""
        pair = [self._embed_norm(embedding_ND), self._hidden_norm(hidden_ND)]
        x_ND = self.layer(self._ops.linear(torch.cat(pair, -1), self._fc), ctx)
        hidden = self._norm(x_ND)
        return Hidden(for_logits=hidden, for_draft=hidden)

    def confidence(self, hidden_RD: Tensor) -> Tensor:
        """Log-odds that the draft drawn from these hidden states stands, float32 [R]; where there is a head.

        hidden_RD: as `forward` yields them, after the final norm. Published heads differ in that, and in whether they
        have a bias: one that was trained on the state before the norm would be wrong here without any error.
        """
        assert self._confidence_weight is not None
        # Row by row in float32, whatever the activations are: one column is no product worth a kernel.
        logit_R = (hidden_RD.float() * self._confidence_weight.float()).sum(-1)
        return logit_R if self._confidence_bias is None else logit_R + self._confidence_bias.float()
