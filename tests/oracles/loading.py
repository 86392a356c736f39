"""Loads checkpoints into bare tensors, without a model. Test material only."""

from __future__ import annotations

from pathlib import Path

import torch

from parallel.slices import WHOLE, Shard
from workers.models.checkpoint import Checkpoint
from workers.models.config import Qwen3NextConfig
from workers.models.qwen3_next_table import parameter_shapes, tensor_table
from workers.models.weights import LoadReport, load_parameters

Tensors = dict[str, torch.Tensor]


def ignore_progress(done_bytes: int, total_bytes: int) -> None:
    pass


def poisoned(config: Qwen3NextConfig, shard: Shard = WHOLE, experts: Shard | None = None) -> Tensors:
    """Parameters as the model would allocate them, full of NaN."""
    shapes = parameter_shapes(config, shard, experts)
    return {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}


def load(path: Path, shard: Shard = WHOLE, experts: Shard | None = None) -> tuple[Tensors, LoadReport]:
    """What one rank keeps of a checkpoint, in float32."""
    with Checkpoint.open(path) as checkpoint:
        parameters = poisoned(checkpoint.config, shard, experts)
        table = tensor_table(checkpoint.config, shard, experts)
        report = load_parameters(checkpoint, table, parameters, ignore_progress)
    return parameters, report
