"""A model cut over ranks gives what one rank gives: nearly so in fast numerics, bit for bit in reference numerics."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import tiny
from oracles.group import GroupOfWorkers
from torch import Tensor

from configs.load import demo_checkpoint
from parallel.mesh import Mesh
from workers import loading
from workers.plan import LoadError
from workers.probe import Trace, trace_sequences
from workers.step import Worker

LAYOUTS = [Mesh(tp=2), Mesh(tp=2, ep=2), Mesh(dp=2, ep=2), Mesh(dp=2, tp=2, ep=4)]
TOLERANCE = 1e-4
"""Largest difference over the largest magnitude, float32."""

LENGTHS = (21, 9, 4)
CHUNKS = (7, 9)
"""Rows per pass, by data-parallel rank: different ones, but the same number of passes."""

SHAPES: dict[str, dict[str, Any]] = {
    **tiny.SHAPES,
    # One key/value head, held by both ranks; an odd number of query heads, experts and tokens for each.
    "shared_kv": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "num_experts": 7,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "vocab_size": 131,
    },
    # Widths that no vector and no grouped kernel likes; a rank's parts are a few columns wide.
    "narrow": {
        "layer_types": ["full_attention", "linear_attention"],
        "num_hidden_layers": 2,
        "hidden_size": 52,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 7,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 6,
        "mlp_only_layers": [1],
        "intermediate_size": 14,
        "vocab_size": 130,
    },
}

QUICK = {
    ("base", "dp2 tp2 ep4"),
    ("tied", "dp1 tp2 ep1"),
    ("one_kv_head", "dp2 tp1 ep2"),
    ("dense", "dp1 tp2 ep2"),
    ("shared_kv", "dp1 tp2 ep1"),
    ("shared_kv", "dp2 tp2 ep4"),
    ("narrow", "dp1 tp2 ep1"),
    ("narrow", "dp2 tp2 ep4"),
}
"""What is compared bit for bit each time; the rest takes minutes."""


def splits(*, sampled: bool) -> list[Any]:
    return [
        pytest.param(
            shape,
            mesh,
            id=f"{shape}-{mesh}",
            marks=pytest.mark.full if sampled and (shape, str(mesh)) not in QUICK else (),
        )
        for shape in ("demo", *SHAPES)
        for mesh in LAYOUTS
        if shape != "one_kv_head" or mesh.tp == 1
    ]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    written = {"demo": demo_checkpoint()}

    def path(shape: str) -> Path:
        if shape not in written:
            written[shape] = tmp_path_factory.mktemp(shape)
            tiny.write_checkpoint(written[shape], SHAPES[shape], seed=3)
        return written[shape]

    return path


@pytest.fixture(scope="module", autouse=True)
def _without_selftest() -> Iterator[None]:
    """These tests compare the same things, and more; the self-test has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "check_invariance", lambda *_: None)
        yield


def sequences(dp_rank: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(dp_rank)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]


@torch.inference_mode()
def trace(worker: Worker, dp_rank: int, chunk: int) -> list[Trace]:
    """Traces of the sequences of `dp_rank`, with the columns of all ranks that share them."""
    rank = worker.rank
    size = rank.model.config.vocab_size
    parts = trace_sequences(rank.model, rank.ops, sequences(dp_rank, size), lambda _: chunk)
    return [
        Trace(
            hidden=part.hidden,
            logits=rank.groups.tp.all_gather(part.logits.contiguous()).transpose(0, 1).flatten(1)[:, :size],
            drafter=part.drafter,
        )
        for part in parts
    ]


def trace_on_one_rank(path: Path, numerics: str, dp: int) -> list[list[Trace]]:
    """By data-parallel rank: its sequences, cut otherwise."""
    group = GroupOfWorkers.load(Mesh(), path, numerics=numerics)
    traces = [trace(group.workers[0], dp_rank, chunk=5) for dp_rank in range(dp)]
    group.close()
    return traces


def trace_on_ranks(path: Path, numerics: str, mesh: Mesh) -> list[list[Trace]]:
    """By rank."""
    group = GroupOfWorkers.load(mesh, path, numerics=numerics)
    with ThreadPoolExecutor(mesh.size) as pool:
        futures = [
            pool.submit(trace, worker, mesh.dp_rank(rank), CHUNKS[mesh.dp_rank(rank)])
            for rank, worker in enumerate(group.workers)
        ]
        traces = [future.result() for future in futures]
    group.close()
    return traces


def pairs(path: Path, numerics: str, mesh: Mesh) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every output of every rank beside that of one rank: (what it is, ours, one rank's)."""
    alone = trace_on_one_rank(path, numerics, mesh.dp)
    for rank, traces in enumerate(trace_on_ranks(path, numerics, mesh)):
        for i, (many, one) in enumerate(zip(traces, alone[mesh.dp_rank(rank)], strict=True)):
            for output in ("hidden", "logits", "drafter"):
                ours, theirs = getattr(many, output), getattr(one, output)
                assert ours.shape == theirs.shape
                assert theirs.isfinite().all()
                yield f"{output} of sequence {i} on rank {rank}", ours, theirs


@pytest.mark.parametrize(("shape", "mesh"), splits(sampled=False))
def test_every_layout_computes_the_model(path_of: Callable[[str], Path], shape: str, mesh: Mesh) -> None:
    for what, ours, theirs in pairs(path_of(shape), "default", mesh):
        difference = float((ours - theirs).abs().max() / theirs.abs().max()) if theirs.numel() else 0.0
        assert difference < TOLERANCE, what


@pytest.mark.parametrize(("shape", "mesh"), splits(sampled=True))
def test_reference_numerics_have_the_bits_of_one_rank(path_of: Callable[[str], Path], shape: str, mesh: Mesh) -> None:
    for what, ours, theirs in pairs(path_of(shape), "reference", mesh):
        assert torch.equal(ours, theirs), what


@pytest.mark.parametrize("mesh", [mesh for mesh in LAYOUTS if mesh.tp > 1], ids=str)
def test_three_heads_are_not_cut_in_two(path_of: Callable[[str], Path], mesh: Mesh) -> None:
    with pytest.raises(LoadError, match="3 attention heads cannot be cut evenly over 2 ranks"):
        GroupOfWorkers.load(mesh, path_of("one_kv_head"))


def test_more_slices_than_ranks_are_the_same_sum(path_of: Callable[[str], Path]) -> None:
    path = path_of("base")
    by_mesh = []
    for mesh in (Mesh(), Mesh(tp=2)):
        group = GroupOfWorkers.load(mesh, path, numerics="reference", k_slices=4)
        with ThreadPoolExecutor(mesh.size) as pool:
            traces = [future.result() for future in [pool.submit(trace, worker, 0, 7) for worker in group.workers]]
        by_mesh.append(traces[0])
        group.close()
    for one, two in zip(*by_mesh, strict=True):
        assert torch.equal(one.logits, two.logits)
    two_slices = trace_on_one_rank(path, "reference", 1)[0]
    assert not torch.equal(by_mesh[0][0].logits, two_slices[0].logits)
