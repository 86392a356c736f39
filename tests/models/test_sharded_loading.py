"""Loading over ranks: every published element is where the model expects it, once per rank that should hold it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import tiny
from oracles.group import GroupOfWorkers
from oracles.loading import ignore_progress, load, poisoned
from oracles.partition import Keeper, num_holders, num_parameters
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.load import demo_checkpoint
from configs.schema import CacheSettings, ModelSettings, ParallelSettings, SpeculationSettings, WorkerSettings
from parallel.mesh import Mesh
from workers.loading import load_rank
from workers.models.checkpoint import Checkpoint
from workers.models.layouts import shard_table
from workers.models.weights import load_parameters
from workers.plan import LoadError

LAYOUTS = [Mesh(tp=2), Mesh(tp=2, ep=2), Mesh(dp=2, ep=2), Mesh(dp=2, tp=2, ep=4)]

SHARED_KV: dict[str, Any] = {
    "layer_types": ["full_attention", "linear_attention"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 130,
    "num_experts": 7,
    "num_experts_per_tok": 2,
}
"""One KV head, which all tensor-parallel ranks hold; experts and vocabulary that nothing divides."""

SHAPES = {**tiny.SHAPES, "shared_kv": SHARED_KV}

SPLITS = [
    # Three heads cannot be cut in two, as another test has it.
    pytest.param(name, mesh, id=f"{name}-{mesh}")
    for name in ("demo", *SHAPES)
    for mesh in LAYOUTS
    if name != "one_kv_head" or mesh.tp == 1
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A checkpoint whose elements are 1, 2, 3, ... throughout, and its config.json."""

    name: str
    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def number_elements(source: Path, directory: Path, name: str) -> Numbered:
    shutil.copy(source / "config.json", directory / "config.json")
    tensors, start = {}, 1
    for published, tensor in load_file(source / "model.safetensors").items():
        stop = start + tensor.numel()
        tensors[published] = torch.arange(start, stop, dtype=torch.int64).to(torch.float32).view(tensor.shape)
        start = stop
    assert start < 1 << 24, "float32 holds these numbers exactly"
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return Numbered(
        name=name, path=directory, config=json.loads((directory / "config.json").read_text()), tensors=tensors
    )


@pytest.fixture(scope="module")
def numbered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Numbered:
    directory = tmp_path_factory.mktemp(request.param)
    source = demo_checkpoint()
    if request.param != "demo":
        source = tmp_path_factory.mktemp("published")
        tiny.write_checkpoint(source, SHAPES[request.param])
    return number_elements(source, directory, request.param)


@pytest.mark.parametrize(("numbered", "mesh"), SPLITS, indirect=["numbered"])
def test_each_rank_holds_its_part_and_together_they_hold_all(numbered: Numbered, mesh: Mesh) -> None:
    holders = torch.zeros(1 + sum(tensor.numel() for tensor in numbered.tensors.values()), dtype=torch.int64)
    for rank in range(mesh.size):
        loaded, report = load(numbered.path, mesh.tensor_shard(rank), mesh.expert_shard(rank))
        expected = Keeper(config=numbered.config, tensors=numbered.tensors, mesh=mesh, rank=rank).parameters()
        assert loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor), name
        held = torch.cat([tensor.flatten() for tensor in loaded.values()]).long()
        holders += torch.bincount(held, minlength=holders.numel())
        # The file is read where a rank keeps something, and nowhere else; padding is no part of it.
        assert report.bytes_read == 4 * int((held > 0).sum())
        assert report.parameter_bytes == 4 * held.numel()
    for name, tensor in numbered.tensors.items():
        assert (holders[tensor.long()] == num_holders(name, numbered.config, mesh)).all(), name


@pytest.mark.parametrize(("numbered", "mesh"), SPLITS, indirect=["numbered"])
def test_no_rank_reads_more_of_the_file_than_it_keeps(
    numbered: Numbered, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    class Recorded:
        def __init__(self, stored: Any) -> None:
            self._stored = stored

        def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
            tensor = self._stored[index]
            read.append(tensor.numel() * tensor.element_size())
            return tensor

    stored = Checkpoint.stored
    monkeypatch.setattr(Checkpoint, "stored", lambda self, name: Recorded(stored(self, name)))
    file_bytes = 4 * sum(tensor.numel() for tensor in numbered.tensors.values())
    with Checkpoint.open(numbered.path) as checkpoint:
        for rank in range(mesh.size):
            read.clear()
            table = shard_table(checkpoint.config, mesh, rank)
            own = poisoned(checkpoint.config, mesh.tensor_shard(rank), mesh.expert_shard(rank))
            report = load_parameters(checkpoint, table, own, ignore_progress)
            assert sum(read) == report.bytes_read < file_bytes
            assert report.bytes_read == sum(4 * int((tensor > 0).sum()) for tensor in own.values())


def tensors_of(root: object) -> Iterator[Tensor]:
    """Every tensor that our objects reach from `root`."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield found
        elif isinstance(found, Mapping):
            waiting.extend(found.values())
        elif isinstance(found, list | tuple):
            waiting.extend(found)
        elif type(found).__module__.partition(".")[0] in ("workers", "parallel", "state"):
            slots = (name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ()))
            waiting.extend(
                getattr(found, name) for name in (*slots, *getattr(found, "__dict__", ())) if hasattr(found, name)
            )


@pytest.mark.parametrize(("numbered", "mesh"), SPLITS, indirect=["numbered"])
def test_a_loaded_rank_holds_the_bytes_that_the_partition_gives_it(numbered: Numbered, mesh: Mesh) -> None:
    group = GroupOfWorkers.load(mesh, numbered.path)
    for rank, worker in enumerate(group.workers):
        expected = 4 * num_parameters(numbered.config, mesh, rank)
        assert worker.rank.description.parameter_bytes == expected
        assert worker.rank.description.num_parameters == sum(tensor.numel() for tensor in numbered.tensors.values())
        model = worker.rank.model
        rotary = {tensor.data_ptr() for tensor in tensors_of(model.rotary)}
        held = {
            tensor.data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors_of(model)
            if tensor.data_ptr() not in rotary
        }
        # Besides its parameters a rank has norms repeated per head and a few constants.
        assert expected <= sum(held.values()) < 1.02 * expected + 4096
    group.close()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint whose configuration a test may change; layouts are refused before a tensor is looked at."""
    tiny.write(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("mesh", "changes", "reason"),
    [
        (
            Mesh(tp=3),
            {"layer_types": ["full_attention"] * 4},
            "8 attention heads cannot be cut evenly over 3 ranks",
        ),
        (
            Mesh(tp=2),
            {"layer_types": ["full_attention"] * 4, "num_attention_heads": 3, "num_key_value_heads": 1},
            "3 attention heads cannot be cut evenly over 2 ranks",
        ),
        (Mesh(tp=2), {"num_attention_heads": 6, "num_key_value_heads": 3}, "3 key/value heads cannot be cut evenly"),
        (
            Mesh(tp=4),
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            "3 key/value heads cannot be shared evenly by 4 ranks",
        ),
        (
            Mesh(tp=2),
            {"linear_num_key_heads": 3, "linear_num_value_heads": 6},
            "3 linear key heads cannot be cut evenly over 2 ranks",
        ),
        (Mesh(tp=2), {"moe_intermediate_size": 33}, "33 rows of an expert cannot be cut evenly over 2 ranks"),
        (Mesh(tp=2), {"shared_expert_intermediate_size": 31}, "31 rows of a dense layer cannot be cut evenly"),
        (
            Mesh(tp=2, ep=2),
            {"mlp_only_layers": [0], "intermediate_size": 65},
            "65 rows of a dense layer cannot be cut evenly over 2 ranks",
        ),
        (
            Mesh(dp=2, tp=2, ep=4),
            {"num_experts": 3},
            "3 experts are too few for 4 ranks; every rank keeps at least one",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Mesh) else "",
)
def test_layouts_that_do_not_suit_the_model_are_refused_with_the_reason(
    base: Path, mesh: Mesh, changes: dict[str, Any], reason: str
) -> None:
    tiny.edit_config(base, **changes)
    with pytest.raises(LoadError) as caught:
        GroupOfWorkers.load(mesh, base)
    assert str(caught.value).startswith(f"the layout {mesh} does not suit this model: {reason}")
    assert str(caught.value).endswith("; choose other parallel sizes")


@pytest.mark.parametrize("mesh", [Mesh(tp=2, ep=2), Mesh(dp=2, ep=2)], ids=str)
def test_whole_experts_need_no_even_width(tmp_path: Path, mesh: Mesh) -> None:
    tiny.write_checkpoint(tmp_path, {"moe_intermediate_size": 33, "num_experts": 5})
    group = GroupOfWorkers.load(mesh, tmp_path)
    assert len({worker.rank.description.parameter_bytes for worker in group.workers}) == 2
    group.close()


def test_key_value_heads_that_ranks_share_are_held_by_each(tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path, SHARED_KV)
    group = GroupOfWorkers.load(Mesh(tp=2), tmp_path)
    assert [worker.rank.model.layers[0].state_specs("float32")[0].num_kv_heads for worker in group.workers] == [1, 1]
    group.close()


@pytest.mark.parametrize(
    ("k_slices", "changes", "reason"),
    [
        (3, {}, "model.k_slices is 3; reference numerics on parallel.tp 2 need a multiple of it"),
        (1, {}, "model.k_slices is 1; reference numerics on parallel.tp 2 need a multiple of it"),
        (
            4,
            {"moe_intermediate_size": 34},
            "model.k_slices is 4; reference numerics on parallel.tp 2 need a number that divides the width 34",
        ),
    ],
)
def test_reference_numerics_refuse_slices_that_ranks_cannot_share(
    tmp_path: Path, k_slices: int, changes: dict[str, Any], reason: str
) -> None:
    tiny.write_checkpoint(tmp_path, {"layer_types": ["full_attention"], "num_hidden_layers": 1, **changes})
    with pytest.raises(LoadError, match=reason):
        GroupOfWorkers.load(Mesh(tp=2), tmp_path, numerics="reference", k_slices=k_slices)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"collectives": "nccl"}, "cluster.collectives is nccl, but this rank runs on a CPU; set it to gloo or auto"),
        ({}, "rank 0 of 2 was not told where the ranks meet"),
    ],
)
def test_a_rank_that_cannot_meet_the_others_says_why(base: Path, changes: dict[str, Any], reason: str) -> None:
    settings = WorkerSettings(
        model=ModelSettings(path=base, device="cpu"),
        cache=CacheSettings(max_model_len=64),
        speculation=SpeculationSettings(),
        parallel=ParallelSettings(tp=2),
        max_step_tokens=64,
        threads=1,
        **changes,
    )
    with pytest.raises(LoadError, match=reason):
        load_rank(settings, lambda stage, done, total: None)
