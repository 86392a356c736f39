"""Tiny random checkpoints of many shapes, and the reference models of any checkpoint. Test material only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from oracles.make_tiny_models import PUBLISHED_MTP, MtpHead, make, write_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

__all__ = [
    "SHAPES",
    "add_confidence_head",
    "drop_mtp",
    "edit_config",
    "make",
    "reference",
    "shard",
    "write",
    "write_checkpoint",
]

SHAPES: dict[str, dict[str, Any]] = {
    "base": {},
    # One KV head for an odd number of query heads; one key head for three value heads; attention first and last.
    "one_kv_head": {
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 24,
    },
    # Embedding table and head are one, of an odd size; the router's probabilities are used as they are.
    "tied": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "vocab_size": 509,
        "tie_word_embeddings": True,
        "norm_topk_prob": False,
        "num_experts": 5,
        "num_experts_per_tok": 1,
    },
    # Dense layers by list and by step; as many key heads as value heads; short convolution; everything rotates.
    "dense": {
        "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
        "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 2,
        "num_experts": 12,
        "num_experts_per_tok": 12,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    },
}
"""Fields of config.json that differ from `make_tiny_models.BASE`, by name of the shape."""


def write(
    directory: Path, shape: str = "base", *, seed: int = 0, dtype: torch.dtype = torch.float32, agree: float = 0.0
) -> tuple[Any, MtpHead]:
    """Writes the checkpoint of a shape without oracle; returns transformers' model and the MTP module."""
    return write_checkpoint(directory, SHAPES[shape], seed=seed, dtype=dtype, agree=agree)


def shard(directory: Path, count: int) -> None:
    """Replaces model.safetensors by `count` shards and their index, tensors dealt out in order of their names."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    weight_map = {
        name: f"model-{i % count + 1:05d}-of-{count:05d}.safetensors" for i, name in enumerate(sorted(tensors))
    }
    for file in set(weight_map.values()):
        held = {name: tensors[name].clone() for name, place in weight_map.items() if place == file}
        save_file(held, directory / file, metadata={"format": "pt"})
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    path.unlink()


def edit_config(directory: Path, **changes: Any) -> None:
    """Replaces fields of config.json; None makes a field null, which is as good as absent."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_mtp(directory: Path) -> None:
    """Removes the MTP module from the files of a single-file checkpoint and from its configuration."""
    path = directory / "model.safetensors"
    save_file({n: t.clone() for n, t in load_file(path).items() if not n.startswith("mtp.")}, path, {"format": "pt"})
    edit_config(directory, num_nextn_predict_layers=None)


def add_confidence_head(directory: Path, *, bias: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a random head to the MTP module of a single-file checkpoint; returns weight [1, H] and bias [1], of zeros
    without one."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    size = len(tensors["mtp.norm.weight"])
    weight = torch.randn(1, size, generator=torch.Generator().manual_seed(7)) / size**0.5
    tensors["mtp.confidence_head.proj.weight"] = weight
    offset = torch.full((1,), 0.75 if bias else 0.0)
    if bias:
        tensors["mtp.confidence_head.proj.bias"] = offset
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, {"format": "pt"})
    return weight, offset


def reference(path: Path) -> tuple[Any, MtpHead]:
    """transformers' model and the reference MTP module of a published single-file checkpoint, in float32."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    lm.set_experts_implementation("eager")
    mtp = MtpHead(lm)
    own: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        for ours, published in PUBLISHED_MTP:
            if not name.startswith(published):
                continue
            name = ours + name.removeprefix(published)
            if match := re.fullmatch(r"(.*experts)\.(\d+)\.(\w+)_proj\.weight", name):
                experts.setdefault(match[1], {})[match[3], int(match[2])] = tensor
            else:
                own[name] = tensor
    for base, stack in experts.items():
        count = len(stack) // 3
        own[f"{base}.gate_up_proj"] = torch.stack([torch.cat([stack["gate", e], stack["up", e]]) for e in range(count)])
        own[f"{base}.down_proj"] = torch.stack([stack["down", e] for e in range(count)])
    mtp.load_state_dict(own)
    return lm, mtp
