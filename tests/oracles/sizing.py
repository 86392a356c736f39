"""What a rank of a model takes, from the model's config.json and a deployment's settings: the product's own arithmetic
over tensors that hold no numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.schema import ServeSettings
from parallel.collectives import CollectiveLog, Group
from parallel.mesh import Mesh
from parallel.rendezvous import RankGroups
from state.accounting import MemoryPlan, plan_memory
from state.layout import ITEMSIZE, StateLayout
from workers.models.config import read_config
from workers.models.layouts import shard_table
from workers.models.qwen3_next import Qwen3Next
from workers.models.rules import table_shapes
from workers.ops.default import DefaultOps

MTP = ("mtp.fc.weight",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """parameter_bytes: of rank 0. total_parameters: of the model."""

    parameter_bytes: int
    total_parameters: int
    layout: StateLayout
    memory: MemoryPlan


def sizes_of(folder: Path, settings: ServeSettings, dtype: str) -> Sizes:
    """Of rank 0; config.json is all that is read. The module that drafts is taken to be there."""
    config = read_config(folder, MTP)
    mesh = Mesh.of(settings.parallel)
    table = shard_table(config, mesh, 0)
    kind = getattr(torch, dtype)
    held = {name: torch.empty(shape, dtype=kind, device="meta") for name, shape in table_shapes(table).items()}
    log = CollectiveLog()
    tp = Group("tp.0", 0, mesh.tp, object() if mesh.tp > 1 else None, log)
    world = Group("world", 0, mesh.size, object() if mesh.size > 1 else None, log)
    gamma_max = settings.speculation.gamma_max
    length = settings.cache.max_model_len or config.context_length
    with torch.device("meta"):
        groups = RankGroups(mesh=mesh, rank=0, tp=tp, world=world, log=log)
        ops = DefaultOps(kind, torch.device("meta"), tp)
        layout = Qwen3Next(config, held, ops, groups, max_length=length, drafts=True).state_layout
    memory = plan_memory(
        layout,
        settings.cache,
        max_model_len=length,
        max_step_tokens=settings.scheduler.max_step_tokens,
        gamma_max=gamma_max,
        hidden_window=settings.speculation.hidden_window,
        drafting=True,
    )
    return Sizes(
        parameter_bytes=ITEMSIZE[dtype] * sum(tensor.numel() for tensor in held.values()),
        total_parameters=sum(math.prod(rule.shape) for rule in table),
        layout=layout,
        memory=memory,
    )
