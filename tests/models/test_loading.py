"""Loading: every published element lands where the model expects it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import tiny
from oracles.loading import Tensors, ignore_progress, load, poisoned
from oracles.make_tiny_models import MtpHead
from safetensors.torch import load_file, save_file

from parallel.slices import WHOLE, Shard
from workers.models.checkpoint import Checkpoint
from workers.models.config import MTP_PREFIX
from workers.models.qwen3_next_table import tensor_table
from workers.models.weights import LoadReport, load_parameters
from workers.plan import LoadError

DEMO = Path(__file__).parents[2] / "configs" / "models" / "demo"


@pytest.fixture(scope="module", params=list(tiny.SHAPES))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, MtpHead]:
    """A checkpoint of every tiny shape, transformers' model and the reference MTP module."""
    path = tmp_path_factory.mktemp(request.param)
    return path, *tiny.write(path, request.param)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    tiny.write(tmp_path, "one_kv_head")
    return tmp_path


def check_layer(loaded: Tensors, prefix: str, layer: Any) -> None:
    """Our parameters of one layer against transformers' module of that layer."""
    own = {name.removeprefix(prefix): tensor for name, tensor in loaded.items() if name.startswith(prefix)}
    assert torch.equal(own["input_norm.weight"], layer.input_layernorm.weight)
    assert torch.equal(own["post_norm.weight"], layer.post_attention_layernorm.weight)
    if hasattr(layer, "self_attn"):
        check_attention(own, layer.self_attn)
    else:
        check_gated_delta(own, layer.linear_attn)
    if hasattr(layer.mlp, "experts"):
        check_experts(own, layer.mlp)
    else:
        assert torch.equal(own["mlp.gate_up.weight"], stacked(layer.mlp))
        assert torch.equal(own["mlp.down.weight"], layer.mlp.down_proj.weight)


def check_attention(own: Tensors, theirs: Any) -> None:
    x = torch.randn(3, theirs.q_proj.in_features)
    q, gate = theirs.q_proj(x).view(3, -1, 2 * theirs.head_dim).chunk(2, dim=-1)  # as its forward splits them
    expected = torch.cat([q.flatten(1), theirs.k_proj(x), theirs.v_proj(x), gate.flatten(1)], dim=-1)
    torch.testing.assert_close(x @ own["mixer.in_proj.weight"].T, expected)
    assert torch.equal(own["mixer.q_norm.weight"], theirs.q_norm.weight)
    assert torch.equal(own["mixer.k_norm.weight"], theirs.k_norm.weight)
    assert torch.equal(own["mixer.out_proj.weight"], theirs.o_proj.weight)


def check_gated_delta(own: Tensors, theirs: Any) -> None:
    x = torch.randn(1, 3, theirs.in_proj_ba.in_features)
    split = theirs.fix_query_key_value_ordering(theirs.in_proj_qkvz(x), theirs.in_proj_ba(x))  # q, k, v, z, b, a
    expected = torch.cat([part.reshape(3, -1) for part in split], dim=-1)
    torch.testing.assert_close(x[0] @ own["mixer.in_proj.weight"].T, expected)
    assert torch.equal(own["mixer.conv.weight"], theirs.conv1d.weight.squeeze(1))
    assert torch.equal(own["mixer.a_log"], theirs.A_log)
    assert torch.equal(own["mixer.dt_bias"], theirs.dt_bias)
    assert torch.equal(own["mixer.norm.weight"], theirs.norm.weight)
    assert torch.equal(own["mixer.out_proj.weight"], theirs.out_proj.weight)


def check_experts(own: Tensors, theirs: Any) -> None:
    assert torch.equal(own["mlp.router.weight"], theirs.gate.weight)
    assert torch.equal(own["mlp.gate_up.weight"], theirs.experts.gate_up_proj)
    assert torch.equal(own["mlp.down.weight"], theirs.experts.down_proj)
    assert torch.equal(own["mlp.shared_gate_up.weight"], stacked(theirs.shared_expert))
    assert torch.equal(own["mlp.shared_down.weight"], theirs.shared_expert.down_proj.weight)
    assert torch.equal(own["mlp.shared_gate.weight"], theirs.shared_expert_gate.weight)


def stacked(mlp: Any) -> torch.Tensor:
    return torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])


@torch.no_grad()
def check_all(loaded: Tensors, lm: Any, mtp: MtpHead) -> None:
    assert all(tensor.isfinite().all() for tensor in loaded.values())
    assert torch.equal(loaded["embed.weight"], lm.model.embed_tokens.weight)
    assert torch.equal(loaded["norm.weight"], lm.model.norm.weight)
    assert ("lm_head.weight" in loaded) is not lm.config.tie_word_embeddings
    if "lm_head.weight" in loaded:
        assert torch.equal(loaded["lm_head.weight"], lm.lm_head.weight)
    for i, layer in enumerate(lm.model.layers):
        check_layer(loaded, f"layers.{i}.", layer)
    assert torch.equal(loaded["mtp.embed_norm.weight"], mtp.enorm.weight)
    assert torch.equal(loaded["mtp.hidden_norm.weight"], mtp.hnorm.weight)
    assert torch.equal(loaded["mtp.fc.weight"], mtp.proj.weight)
    assert torch.equal(loaded["mtp.norm.weight"], mtp.final_norm.weight)
    check_layer(loaded, "mtp.layer.", mtp.blocks[0])


def test_every_shape_loads_as_transformers_holds_it(written: tuple[Path, Any, MtpHead]) -> None:
    path, lm, mtp = written
    loaded, report = load(path)
    check_all(loaded, lm, mtp)
    published = load_file(path / "model.safetensors")
    num_elements = sum(tensor.numel() for tensor in published.values())
    assert report == LoadReport(
        num_tensors=len(published),
        num_skipped=0,
        bytes_read=4 * num_elements,
        num_parameters=num_elements,
        parameter_bytes=4 * num_elements,
    )


@pytest.mark.parametrize("bias", [False, True])
def test_a_confidence_head_loads_whole_on_every_rank(base: Path, bias: bool) -> None:
    without, _ = load(base)
    weight, offset = tiny.add_confidence_head(base, bias=bias)
    for shard in (WHOLE, Shard(0, 1), Shard(0, 3), Shard(2, 3)):
        loaded, _ = load(base, WHOLE, shard)
        assert torch.equal(loaded.pop("mtp.confidence.weight"), weight)
        if bias:
            assert torch.equal(loaded.pop("mtp.confidence.bias"), offset)
        assert loaded.keys() == without.keys()


def test_a_bias_without_its_head_is_refused(base: Path) -> None:
    tiny.add_confidence_head(base)
    path = base / "model.safetensors"
    tensors = load_file(path)
    del tensors["mtp.confidence_head.proj.weight"]
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, {"format": "pt"})
    with pytest.raises(LoadError, match=r"1 surplus: mtp\.confidence_head\.proj\.bias"):
        load(base)


def test_a_head_of_another_shape_is_refused(base: Path) -> None:
    """As of heads that see the embedding of the token before as well."""
    weight, _ = tiny.add_confidence_head(base)
    path = base / "model.safetensors"
    tensors = load_file(path) | {"mtp.confidence_head.proj.weight": torch.cat([weight, weight], 1)}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, {"format": "pt"})
    with pytest.raises(LoadError, match=r"1 misshapen: mtp\.confidence_head\.proj\.weight is \[1, 128\]"):
        load(base)


def test_the_bundled_checkpoint_loads_as_transformers_holds_it() -> None:
    lm, mtp = tiny.reference(DEMO)
    loaded, report = load(DEMO)
    check_all(loaded, lm, mtp)
    assert report.num_tensors == 270
    assert report.parameter_bytes == 2 * report.bytes_read  # bfloat16 on disk, float32 here


def test_shards_load_as_the_single_file_does(base: Path) -> None:
    single, report = load(base)
    tiny.shard(base, 3)
    sharded, sharded_report = load(base)
    assert sharded_report == report
    assert all(torch.equal(sharded[name], tensor) for name, tensor in single.items())


def test_each_parameter_keeps_its_own_dtype(base: Path) -> None:
    with Checkpoint.open(base) as checkpoint:
        parameters = poisoned(checkpoint.config)
        exact = {name: tensor.clone() for name, tensor in parameters.items()}
        wanted = {n: torch.float32 if n.endswith(("a_log", "dt_bias")) else torch.bfloat16 for n in parameters}
        parameters = {name: tensor.to(wanted[name]) for name, tensor in parameters.items()}
        for target in (exact, parameters):
            load_parameters(checkpoint, tensor_table(checkpoint.config), target, ignore_progress)
    for name, tensor in parameters.items():
        assert tensor.dtype == wanted[name]
        assert torch.equal(tensor, exact[name].to(wanted[name]))


def test_parameters_are_filled_in_place(base: Path) -> None:
    with Checkpoint.open(base) as checkpoint:
        parameters = {name: torch.nn.Parameter(tensor) for name, tensor in poisoned(checkpoint.config).items()}
        before = {name: tensor.data_ptr() for name, tensor in parameters.items()}
        load_parameters(checkpoint, tensor_table(checkpoint.config), parameters, ignore_progress)
    assert before == {name: tensor.data_ptr() for name, tensor in parameters.items()}
    assert all(tensor.isfinite().all() for tensor in parameters.values())


def test_progress_counts_the_bytes_of_the_files(base: Path) -> None:
    calls: list[tuple[int, int]] = []
    with Checkpoint.open(base) as checkpoint:
        table = tensor_table(checkpoint.config)
        load_parameters(checkpoint, table, poisoned(checkpoint.config), lambda *call: calls.append(call))
    total = sum(tensor.numel() * 4 for tensor in load_file(base / "model.safetensors").values())
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert len(calls) == len(table) + 1
    assert all(before < after for (before, _), (after, _) in itertools.pairwise(calls))


@pytest.mark.parametrize("has_head", [False, True])
def test_a_drafter_that_is_not_wanted_stays_on_disk(base: Path, has_head: bool) -> None:
    if has_head:
        tiny.add_confidence_head(base)
    with Checkpoint.open(base) as checkpoint:
        config = dataclasses.replace(checkpoint.config, num_mtp_layers=0)
        parameters = poisoned(config)
        table = tensor_table(config)
        report = load_parameters(checkpoint, table, parameters, ignore_progress, skip_prefixes=(MTP_PREFIX,))
        num_mtp = sum(name.startswith(MTP_PREFIX) for name in checkpoint.tensors)
        with pytest.raises(LoadError, match=rf"{num_mtp} surplus: mtp\.\S+; "):
            load_parameters(checkpoint, table, parameters, ignore_progress)
    assert report.num_skipped == num_mtp > 0
    assert not any(name.startswith(MTP_PREFIX) for name in parameters)
    assert all(tensor.isfinite().all() for tensor in parameters.values())


def test_the_files_decide_on_mtp_where_the_config_is_silent(base: Path) -> None:
    tiny.edit_config(base, num_nextn_predict_layers=None)
    with Checkpoint.open(base) as checkpoint:
        assert checkpoint.config.num_mtp_layers == 1
    tiny.drop_mtp(base)
    with Checkpoint.open(base) as checkpoint:
        assert checkpoint.config.num_mtp_layers == 0
    load(base)
