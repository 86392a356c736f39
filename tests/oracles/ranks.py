"""Loaded models and ranks for tests, cached per process: checkpoint × numerics × dtype. Test material only."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from configs.load import demo_checkpoint
from configs.schema import CacheSettings, ModelSettings, SpeculationSettings, WorkerSettings
from parallel.collectives import solo
from parallel.rendezvous import alone
from workers.models.checkpoint import Checkpoint
from workers.models.qwen3_next import Qwen3Next
from workers.models.qwen3_next_table import tensor_table
from workers.models.rules import table_shapes
from workers.models.weights import load_parameters
from workers.ops.base import Ops
from workers.ops.default import DefaultOps
from workers.ops.reference import ReferenceOps
from workers.step import Worker


def make_ops(numerics: str, dtype: torch.dtype = torch.float32) -> Ops:
    return ReferenceOps(2, solo()) if numerics == "reference" else DefaultOps(dtype, torch.device("cpu"), solo())


@functools.lru_cache(maxsize=16)
def load_model(path: Path, numerics: str = "default", dtype: torch.dtype = torch.float32) -> tuple[Qwen3Next, Ops]:
    """Target and drafter of a checkpoint, without pools."""
    ops = make_ops(numerics, dtype)
    with Checkpoint.open(path) as checkpoint:
        table = tensor_table(checkpoint.config)
        weights = {
            name: torch.empty(shape, dtype=torch.float32 if name.endswith((".a_log", ".dt_bias")) else dtype)
            for name, shape in table_shapes(table).items()
        }
        load_parameters(checkpoint, table, weights, lambda done, total: None)
        config = checkpoint.config
    drafts = config.num_mtp_layers > 0
    return Qwen3Next(config, weights, ops, alone(), max_length=config.context_length, drafts=drafts), ops


def load_worker(
    path: Path | None = None,
    *,
    numerics: str = "default",
    max_running: int = 16,
    max_model_len: int = 256,
    page_size: int = 16,
    hidden_window: int = 16,
    dtype: str = "auto",
    device: str = "cpu",
    confidence: str = "auto",
) -> Worker:
    """A rank with pools, sized for tests."""
    return Worker.load(
        WorkerSettings(
            model=ModelSettings(path=path or demo_checkpoint(), numerics=numerics, dtype=dtype, device=device),  # type: ignore[arg-type]
            cache=CacheSettings(
                memory_mib=512, page_size=page_size, max_running=max_running, max_model_len=max_model_len
            ),
            speculation=SpeculationSettings(hidden_window=hidden_window, confidence=confidence),  # type: ignore[arg-type]
            max_step_tokens=512,
            threads=1,
        ),
        lambda stage, done, total: None,
    )
