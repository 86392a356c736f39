"""What tells checkpoints apart without reading a weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from oracles import tiny
from safetensors.torch import load_file, save_file

from workers.models.checkpoint import Checkpoint


def identity(path: Path) -> str:
    with Checkpoint.open(path) as checkpoint:
        return checkpoint.identity()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny.write(tmp_path, "one_kv_head")
    return tmp_path


def rewrite(path: Path, name: str, tensor: torch.Tensor) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file) | {name: tensor}
    save_file({key: value.clone() for key, value in tensors.items()}, file, {"format": "pt"})


def test_it_does_not_depend_on_the_place_of_weights_or_files(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = identity(base)
    assert len(expected) == 64
    assert int(expected, 16)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    tiny.write(elsewhere, "one_kv_head", seed=1)
    assert identity(elsewhere) == expected, "the weights were read"
    tiny.shard(base, 3)
    assert identity(base) == expected


@pytest.mark.parametrize("change", ["config", "name", "dtype", "shape"])
def test_it_depends_on_the_configuration_and_on_every_header(base: Path, change: str) -> None:
    before = identity(base)
    match change:
        case "config":
            config = base / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-5}))
        case "name":
            tiny.add_confidence_head(base)
        case "dtype":
            rewrite(base, "model.norm.weight", torch.ones(64, dtype=torch.bfloat16))
        case "shape":
            rewrite(base, "model.norm.weight", torch.ones(65))
    assert identity(base) != before
