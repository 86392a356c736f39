"""Whether a model can be split as a mesh says, from its config.json alone. No torch, no weights."""

from __future__ import annotations

from pathlib import Path

from parallel.mesh import Mesh
from workers.models.config import Qwen3NextConfig, read_config
from workers.models.qwen3_next_table import tensor_table
from workers.models.rules import TensorRule
from workers.plan import LoadError


def shard_table(config: Qwen3NextConfig, mesh: Mesh, rank: int) -> tuple[TensorRule, ...]:
    """What `rank` reads of a checkpoint. Raises LoadError, with the reason, where the model cannot be split so."""
    try:
        return tensor_table(config, mesh.tensor_shard(rank), mesh.expert_shard(rank))
    except ValueError as error:
        raise LoadError(f"the layout {mesh} does not suit this model: {error}; choose other parallel sizes") from error


def check_layout(checkpoint: Path, mesh: Mesh) -> None:
    """Before any process is started. Raises LoadError, also for a config.json that is not served."""
    shard_table(read_config(checkpoint), mesh, 0)
