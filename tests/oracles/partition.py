"""What each rank is to hold of a Qwen3-Next checkpoint, written down a second time: with whole tensors instead of
spans, as the number of holders of each tensor, and as a formula. Test material only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """One rank, and what it is to keep of the published tensors. config: what config.json holds."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    mesh: Mesh
    rank: int

    @property
    def tp(self) -> int:
        return self.mesh.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.mesh.tp

    def mine(self, whole: Tensor, dim: int) -> Tensor:
        assert whole.shape[dim] % self.tp == 0
        return whole.chunk(self.tp, dim)[self.tp_rank]

    def parameters(self) -> dict[str, Tensor]:
        config = self.config
        own = {
            "embed.weight": self.vocabulary("model.embed_tokens.weight"),
            "norm.weight": self.tensors["model.norm.weight"],
        }
        if not config["tie_word_embeddings"]:
            own["lm_head.weight"] = self.vocabulary("lm_head.weight")
        for i, kind in enumerate(config["layer_types"]):
            own |= self.layer(f"model.layers.{i}.", f"layers.{i}.", kind == "full_attention", is_dense(config, i))
        names = {"pre_fc_norm_embedding": "embed_norm", "pre_fc_norm_hidden": "hidden_norm", "fc": "fc", "norm": "norm"}
        for published, name in names.items():
            own[f"mtp.{name}.weight"] = self.tensors[f"mtp.{published}.weight"]
        return own | self.layer("mtp.layers.0.", "mtp.layer.", True, False)

    def vocabulary(self, name: str) -> Tensor:
        whole = self.tensors[name]
        missing = -whole.shape[0] % (64 * self.tp) if self.tp > 1 else 0
        return self.mine(torch.cat([whole, torch.zeros(missing, whole.shape[1])]), 0)

    def layer(self, theirs: str, ours: str, attends: bool, dense: bool) -> dict[str, Tensor]:
        own = {
            "input_norm.weight": self.tensors[f"{theirs}input_layernorm.weight"],
            "post_norm.weight": self.tensors[f"{theirs}post_attention_layernorm.weight"],
        }
        own |= self.attention(f"{theirs}self_attn.") if attends else self.gated_delta(f"{theirs}linear_attn.")
        if dense:
            own["mlp.gate_up.weight"], own["mlp.down.weight"] = self.swiglu(f"{theirs}mlp.")
        else:
            own |= self.experts(f"{theirs}mlp.")
        return {ours + name: tensor for name, tensor in own.items()}

    def attention(self, theirs: str) -> dict[str, Tensor]:
        config = self.config
        heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        q, gate = self.mine(self.tensors[f"{theirs}q_proj.weight"].view(heads, 2, dim, -1), 0).unbind(1)
        shared = []
        for name in ("k_proj", "v_proj"):
            by_head = self.tensors[f"{theirs}{name}.weight"].view(kv, dim, -1)
            shared.append(self.mine(by_head, 0) if kv >= self.tp else by_head[self.tp_rank * kv // self.tp])
        hidden = q.shape[-1]
        return {
            "mixer.in_proj.weight": torch.cat([part.reshape(-1, hidden) for part in (q, *shared, gate)]),
            "mixer.q_norm.weight": self.tensors[f"{theirs}q_norm.weight"],
            "mixer.k_norm.weight": self.tensors[f"{theirs}k_norm.weight"],
            "mixer.out_proj.weight": self.mine(self.tensors[f"{theirs}o_proj.weight"], 1),
        }

    def gated_delta(self, theirs: str) -> dict[str, Tensor]:
        config = self.config
        keys, ratio = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
        key, value = config["linear_key_head_dim"], ratio * config["linear_value_head_dim"]
        groups = self.mine(self.tensors[f"{theirs}in_proj_qkvz.weight"].view(keys, 2 * key + 2 * value, -1), 0)
        rates = self.mine(self.tensors[f"{theirs}in_proj_ba.weight"].view(keys, 2 * ratio, -1), 0)
        parts = [*groups.split([key, key, value, value], 1), *rates.split([ratio, ratio], 1)]
        channels = self.tensors[f"{theirs}conv1d.weight"][:, 0].split([keys * key, keys * key, keys * value])
        return {
            "mixer.in_proj.weight": torch.cat([part.reshape(-1, groups.shape[-1]) for part in parts]),
            "mixer.conv.weight": torch.cat([self.mine(segment, 0) for segment in channels]),
            "mixer.a_log": self.mine(self.tensors[f"{theirs}A_log"], 0),
            "mixer.dt_bias": self.mine(self.tensors[f"{theirs}dt_bias"], 0),
            "mixer.norm.weight": self.tensors[f"{theirs}norm.weight"],
            "mixer.out_proj.weight": self.mine(self.tensors[f"{theirs}out_proj.weight"], 1),
        }

    def experts(self, theirs: str) -> dict[str, Tensor]:
        count = self.config["num_experts"]
        names = ("gate_proj", "up_proj", "down_proj")
        every = [[self.tensors[f"{theirs}experts.{e}.{name}.weight"] for name in names] for e in range(count)]
        if self.mesh.ep > 1:
            share, more = divmod(count, self.mesh.ep)
            start = self.rank * share + min(self.rank, more)
            kept = every[start : start + share + (self.rank < more)]
        else:
            kept = [[self.mine(gate, 0), self.mine(up, 0), self.mine(down, 1)] for gate, up, down in every]
        shared_gate_up, shared_down = self.swiglu(f"{theirs}shared_expert.")
        return {
            "mlp.router.weight": self.tensors[f"{theirs}gate.weight"],
            "mlp.gate_up.weight": torch.stack([torch.cat([gate, up]) for gate, up, _ in kept]),
            "mlp.down.weight": torch.stack([down for _, _, down in kept]),
            "mlp.shared_gate_up.weight": shared_gate_up,
            "mlp.shared_down.weight": shared_down,
            "mlp.shared_gate.weight": self.tensors[f"{theirs}shared_expert_gate.weight"],
        }

    def swiglu(self, theirs: str) -> tuple[Tensor, Tensor]:
        gate, up, down = (self.tensors[f"{theirs}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return torch.cat([self.mine(gate, 0), self.mine(up, 0)]), self.mine(down, 1)


def is_dense(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a target layer has no experts."""
    return layer in config["mlp_only_layers"] or (layer + 1) % config["decoder_sparse_step"] != 0


def num_holders(name: str, config: Mapping[str, Any], mesh: Mesh) -> int:
    """How many ranks hold each element of a published tensor."""
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if "norm" in leaf or "norm" in name.rsplit(".", 2)[-2] or leaf in ("gate", "shared_expert_gate", "fc"):
        return mesh.size
    if ".experts." in name and mesh.ep > 1:
        return 1
    if leaf in ("k_proj", "v_proj"):
        return mesh.dp * max(1, mesh.tp // config["num_key_value_heads"])
    return mesh.dp


def num_parameters(config: Mapping[str, Any], mesh: Mesh, rank: int) -> int:
    """The partition as a formula: elements of one rank, padding included."""
    hidden, dim, tp = config["hidden_size"], config["head_dim"], mesh.tp
    vocab = config["vocab_size"] if tp == 1 else 64 * math.ceil(config["vocab_size"] / (64 * tp))
    tables = vocab * hidden * (1 if config["tie_word_embeddings"] else 2)
    heads, kv = config["num_attention_heads"] // tp, max(1, config["num_key_value_heads"] // tp)
    attention = (2 * heads + 2 * kv) * dim * hidden + heads * dim * hidden + 2 * dim
    keys, values = config["linear_num_key_heads"] // tp, config["linear_num_value_heads"] // tp
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
    channels = 2 * keys * key + values * value
    delta = (channels + values * value + 2 * values) * hidden + channels * config["linear_conv_kernel_dim"]
    delta += 2 * values + value + values * value * hidden
    owned, size = config["num_experts"], config["moe_intermediate_size"] // tp
    if mesh.ep > 1:
        owned = owned // mesh.ep + (rank < owned % mesh.ep)
        size = config["moe_intermediate_size"]
    experts = 3 * owned * size * hidden + 3 * config["shared_expert_intermediate_size"] // tp * hidden
    experts += (config["num_experts"] + 1) * hidden
    total = tables + hidden
    for i, kind in enumerate(config["layer_types"]):
        total += 2 * hidden + (attention if kind == "full_attention" else delta)
        total += 3 * config["intermediate_size"] // tp * hidden if is_dense(config, i) else experts
    return total + 5 * hidden + 2 * hidden * hidden + attention + experts
