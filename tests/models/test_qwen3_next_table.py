"""The loading table over several ranks: what each keeps, and that together they keep the whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import tiny
from oracles.loading import Tensors, load

from parallel.slices import WHOLE, Shard
from workers.models.config import Qwen3NextConfig, read_config
from workers.models.qwen3_next_table import parameter_shapes, tensor_table
from workers.models.rules import Box

DEMO_CONFIG = read_config(Path(__file__).parents[2] / "configs" / "models" / "demo")


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Qwen3NextConfig, int, bool]:
    """A configuration that `size` ranks can cut, and whether they own whole experts."""
    size = draw(st.sampled_from([1, 2, 4]))
    kv = draw(st.sampled_from([1, 2, 4, 8]))
    keys = size * draw(st.integers(1, 2))
    config = dataclasses.replace(
        DEMO_CONFIG,
        vocab_size=draw(st.integers(1, 300)),
        hidden_size=3,
        num_layers=3,
        layer_types=("full_attention", "linear_attention", "linear_attention"),
        dense_layers=(2,),
        intermediate_size=size * 2,
        num_heads=max(kv, size) * draw(st.integers(1, 2)),
        num_kv_heads=kv,
        head_dim=2,
        lin_key_heads=keys,
        lin_value_heads=keys * draw(st.integers(1, 3)),
        lin_key_dim=draw(st.integers(1, 3)),
        lin_value_dim=draw(st.integers(1, 3)),
        num_experts=draw(st.integers(4, 6)),
        expert_size=size * draw(st.integers(1, 2)),
        shared_size=size,
        tied=draw(st.booleans()),
        has_confidence_head=draw(st.booleans()),
        has_confidence_bias=draw(st.booleans()),
    )
    return config, size, draw(st.booleans())


def count_up(counts: torch.Tensor, block: Box) -> None:
    counts[tuple(slice(*span) for span in block)] += 1


@given(cuts())
def test_over_all_ranks_every_element_is_kept_once_or_everywhere(cut: tuple[Qwen3NextConfig, int, bool]) -> None:
    config, size, whole_experts = cut
    kept: Tensors = {}
    for rank in range(size):
        shard = Shard(rank, size)
        experts = shard if whole_experts else None
        filled = {n: torch.zeros(shape) for n, shape in parameter_shapes(config, shard, experts).items()}
        for rule in tensor_table(config, shard, experts):
            counts = kept.setdefault(rule.published, torch.zeros(rule.shape))
            for piece in rule.pieces:
                count_up(counts, piece.source)
                count_up(filled[rule.parameter], piece.target)
            for block in rule.padding:
                count_up(filled[rule.parameter], block)
        assert all(bool((counts == 1).all()) for counts in filled.values())
    for name, counts in kept.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            copies = max(1, size // config.num_kv_heads)
        elif (
            name.endswith(("norm.weight", ".gate.weight", "shared_expert_gate.weight", "fc.weight"))
            or "norm_" in name
            or "confidence" in name
        ):
            copies = size
        else:
            copies = 1
        assert bool((counts == copies).all()), name


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_the_heads_of_the_whole_in_order(tmp_path: Path, size: int) -> None:
    """Every section of a fused parameter is, rank after rank, the section of the whole."""
    tiny.write(tmp_path, "base")
    whole, _ = load(tmp_path)
    ranks = [load(tmp_path, Shard(rank, size))[0] for rank in range(size)]
    config = read_config(tmp_path)
    q = config.num_heads * config.head_dim
    gdn = (64, 64, 128, 128, 8, 8)  # q, k, v, z, b, a
    sections = {
        "layers.0.mixer.in_proj.weight": gdn,
        "layers.0.mixer.conv.weight": gdn[:3],
        "layers.0.mixer.a_log": (8,),
        "layers.3.mixer.in_proj.weight": (q, 32, 32, q),  # q, k, v, gate
        "layers.0.mlp.shared_gate_up.weight": (32, 32),
        "embed.weight": (512,),
    }
    for name, lengths in sections.items():
        for i, part in enumerate(whole[name].split(lengths)):
            mine = []
            for rank in ranks:
                rows = len(rank[name]) * torch.tensor(lengths) // sum(lengths)
                if size > config.num_kv_heads and name == "layers.3.mixer.in_proj.weight":
                    rows = torch.tensor([q // size, config.head_dim, config.head_dim, q // size])
                mine.append(rank[name].split(rows.tolist())[i])
            if len(mine[0]) * size > len(part):  # neighbours share KV heads
                mine = mine[:: len(mine[0]) * size // len(part)]
            assert torch.equal(torch.cat(mine), part), (name, i)
    for name in ("layers.0.mixer.out_proj.weight", "layers.3.mixer.out_proj.weight", "layers.0.mlp.down.weight"):
        assert torch.equal(torch.cat([rank[name] for rank in ranks], dim=-1), whole[name])


def test_ranks_that_own_experts_hold_them_whole(tmp_path: Path) -> None:
    tiny.write(tmp_path, "one_kv_head")
    whole, _ = load(tmp_path)
    ranks = [load(tmp_path, WHOLE, Shard(rank, 3))[0] for rank in range(3)]
    for name in ("layers.1.mlp.gate_up.weight", "layers.1.mlp.down.weight", "mtp.layer.mlp.gate_up.weight"):
        assert [len(rank[name]) for rank in ranks] == [3, 3, 2]
        assert torch.equal(torch.cat([rank[name] for rank in ranks]), whole[name])


def test_padding_of_the_vocabulary_is_zero(tmp_path: Path) -> None:
    tiny.write(tmp_path, "tied")
    whole, _ = load(tmp_path)
    last, _ = load(tmp_path, Shard(1, 2))
    assert torch.equal(last["embed.weight"][:253], whole["embed.weight"][256:])
    assert torch.equal(last["embed.weight"][253:], torch.zeros(3, 64))
