"""A checkpoint that does not fit is refused by name, before anything is copied."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from oracles import tiny
from oracles.loading import Tensors, ignore_progress, load, poisoned
from safetensors.torch import load_file, save_file

from workers.models.checkpoint import Checkpoint
from workers.models.qwen3_next_table import tensor_table
from workers.models.rules import TensorRule
from workers.models.weights import load_parameters
from workers.plan import LoadError


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    tiny.write(tmp_path, "one_kv_head")
    return tmp_path


def edit_tensors(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replaces or adds tensors; None removes one."""
    tensors = load_file(path / "model.safetensors") | changes
    save_file({n: t.clone() for n, t in tensors.items() if t is not None}, path / "model.safetensors")


def refused(path: Path) -> str:
    """The text of the error that loading ends with; no parameter may have changed."""
    with Checkpoint.open(path) as checkpoint:
        parameters = poisoned(checkpoint.config)
        with pytest.raises(LoadError) as caught:
            load_parameters(checkpoint, tensor_table(checkpoint.config), parameters, ignore_progress)
    assert all(tensor.isnan().all() for tensor in parameters.values())
    assert str(path) in str(caught.value)
    return str(caught.value)


NORM = "model.layers.1.input_layernorm.weight"


def test_missing_tensors_are_counted_and_the_first_are_named(base: Path) -> None:
    experts = [f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in range(7)]
    edit_tensors(base, dict.fromkeys([NORM, *experts]))
    text = refused(base)
    assert f"8 missing: {experts[0]}; {experts[1]}; " in text
    assert ", and 3 more" in text


def test_a_surplus_tensor_is_named(base: Path) -> None:
    edit_tensors(base, {"model.layers.9.mlp.gate.weight": torch.zeros(2, 2)})
    assert "1 surplus: model.layers.9.mlp.gate.weight" in refused(base)


def test_rotary_frequencies_are_no_surplus(base: Path) -> None:
    edit_tensors(base, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)})
    _, report = load(base)
    assert report.num_skipped == 1


def test_a_misshapen_tensor_is_named_with_both_shapes(base: Path) -> None:
    edit_tensors(base, {NORM: torch.zeros(65)})
    assert f"1 misshapen: {NORM} is [65], config.json says [64]" in refused(base)


def test_a_transposed_tensor_is_misshapen_though_its_size_fits(base: Path) -> None:
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    edit_tensors(base, {name: load_file(base / "model.safetensors")[name].T.contiguous()})
    assert f"{name} is [32, 64], config.json says [64, 32]" in refused(base)


@pytest.mark.parametrize(("dtype", "stored"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")])
def test_quantised_elements_are_refused_by_name(base: Path, dtype: torch.dtype, stored: str) -> None:
    edit_tensors(base, {NORM: torch.zeros(64).to(dtype)})
    assert f"1 unreadable: {NORM} is stored as {stored}; served: F32, BF16, F16" in refused(base)


def test_all_kinds_of_problem_are_reported_at_once(base: Path) -> None:
    edit_tensors(base, {NORM: torch.zeros(3), "extra": torch.zeros(1), "model.norm.weight": None})
    text = refused(base)
    assert all(kind in text for kind in ("1 missing: model.norm.weight", "1 surplus: extra", f"1 misshapen: {NORM}"))


def test_an_untied_model_needs_its_head(base: Path) -> None:
    edit_tensors(base, {"lm_head.weight": None})
    assert "1 missing: lm_head.weight" in refused(base)


def test_a_tied_model_has_no_head_of_its_own(tmp_path: Path) -> None:
    tiny.write(tmp_path, "tied")
    edit_tensors(tmp_path, {"lm_head.weight": torch.zeros(509, 64)})
    assert "1 surplus: lm_head.weight although tie_word_embeddings is true" in refused(tmp_path)


def test_a_scheme_without_a_reader_is_refused(base: Path) -> None:
    with Checkpoint.open(base) as checkpoint:
        table = [dataclasses.replace(rule, scheme="fp8_block") for rule in tensor_table(checkpoint.config)]
        with pytest.raises(LoadError, match=r"lm_head\.weight is stored by scheme fp8_block; served: plain"):
            load_parameters(checkpoint, table, poisoned(checkpoint.config), ignore_progress)


def test_parameters_that_the_table_does_not_fill_exactly_are_named(base: Path) -> None:
    with Checkpoint.open(base) as checkpoint:
        table = tensor_table(checkpoint.config)
        parameters = poisoned(checkpoint.config)

        def attempt(parameters: Tensors, rules: tuple[TensorRule, ...] = table) -> str:
            with pytest.raises(LoadError) as caught:
                load_parameters(checkpoint, rules, parameters, ignore_progress)
            return str(caught.value)

        assert "1 unfilled: parameter bias, which no" in attempt(parameters | {"bias": torch.zeros(1)})
        without = {name: tensor for name, tensor in parameters.items() if name != "norm.weight"}
        assert "1 unplaced: parameter norm.weight, which the model" in attempt(without)
        wide = parameters | {"norm.weight": torch.zeros(65)}
        assert "1 unfilled: parameter norm.weight is [65], filled as [64]" in attempt(wide)
        holed = tuple(
            dataclasses.replace(rule, pieces=rule.pieces[:-2])
            if rule.published.endswith("in_proj_qkvz.weight")
            else rule
            for rule in table
        )
        assert "in_proj.weight: 1408 of 10624 elements are filled" in attempt(parameters, holed)


def test_a_directory_without_safetensors_is_refused(base: Path) -> None:
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"neither model\.safetensors nor .*; only weights in safetensors files"):
        Checkpoint.open(base)


def test_a_truncated_file_is_refused(base: Path) -> None:
    tiny.shard(base, 2)
    shard = base / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(LoadError, match=r"model-00002-of-00002\.safetensors is truncated or not a safetensors file"):
        Checkpoint.open(base)


def test_a_file_of_another_format_is_refused(base: Path) -> None:
    (base / "model.safetensors").write_bytes(b"PK\x03\x04 a zip archive")
    with pytest.raises(LoadError, match=r"model\.safetensors is truncated or not a safetensors file"):
        Checkpoint.open(base)


def test_a_missing_shard_is_named(base: Path) -> None:
    tiny.shard(base, 2)
    (base / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model-00001-of-00002\.safetensors is missing; .* lists 78 tensors in it"):
        Checkpoint.open(base)


@pytest.mark.parametrize(
    ("tensor", "place", "message"),
    [
        ("lost.weight", "model-00001-of-00002.safetensors", "places lost.weight in model-00001.*does not hold it"),
        (NORM, None, f"holds {NORM}, which .* does not place there"),
        (NORM, "../elsewhere.safetensors", f"weight_map places {NORM} in '../elsewhere.safetensors'; a file name"),
    ],
)
def test_an_index_that_does_not_match_its_shards_is_refused(
    base: Path, tensor: str, place: str | None, message: str
) -> None:
    tiny.shard(base, 2)
    index = base / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | {tensor: place}
    index.write_text(json.dumps({"weight_map": {name: file for name, file in weight_map.items() if file}}))
    with pytest.raises(LoadError, match=message):
        Checkpoint.open(base)


def test_an_index_without_a_map_is_refused(base: Path) -> None:
    tiny.shard(base, 2)
    (base / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(LoadError, match="weight_map is missing or empty"):
        Checkpoint.open(base)


def test_a_promised_mtp_module_must_be_there(base: Path) -> None:
    tiny.drop_mtp(base)
    tiny.edit_config(base, num_nextn_predict_layers=1)
    with pytest.raises(LoadError, match=r"num_nextn_predict_layers is 1, but the files hold no tensor mtp\.\*; set it"):
        Checkpoint.open(base)
