"""config.json and generation_config.json: both spellings are read, and what is not served is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workers.models.config import GenerationDefaults, read_config
from workers.plan import MAX_EOS_IDS, LoadError

DEMO = Path(__file__).parents[2] / "configs" / "models" / "demo"
PUBLISHED: dict[str, Any] = json.loads((DEMO / "config.json").read_text())


def write(path: Path, changes: dict[str, Any], drop: tuple[str, ...] = (), generation: Any = None) -> Path:
    values = {name: value for name, value in (PUBLISHED | changes).items() if name not in drop}
    (path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_the_bundled_checkpoint() -> None:
    config = read_config(DEMO)
    assert config.layer_types == ("linear_attention", "linear_attention", "full_attention") * 2
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rotary_dim) == (4, 2, 64, 16)
    assert (config.num_experts, config.experts_per_token, config.values_per_key) == (8, 2, 2)
    assert config.conv_channels == 2 * 2 * 64 + 4 * 64
    assert (config.dtype, config.tied, config.num_mtp_layers, config.eos_token_ids) == ("bfloat16", False, 1, (0,))


def test_both_spellings_say_the_same(tmp_path: Path) -> None:
    changes = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "dtype": "bfloat16",
    }
    drop = ("rope_theta", "partial_rotary_factor", "rope_scaling", "torch_dtype", "layer_types")
    assert read_config(write(tmp_path, changes, drop, {"eos_token_id": [0]})) == read_config(DEMO)


def test_full_attention_comes_every_interval(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {"full_attention_interval": 2}, ("layer_types",)))
    assert config.layer_types == ("linear_attention", "full_attention") * 3


@pytest.mark.parametrize(
    ("step", "listed", "dense"), [(1, [], ()), (1, [4, 0], (0, 4)), (2, [], (0, 2, 4)), (3, [2], (0, 1, 2, 3, 4))]
)
def test_dense_layers_by_list_and_by_step(tmp_path: Path, step: int, listed: list[int], dense: tuple[int, ...]) -> None:
    config = read_config(write(tmp_path, {"decoder_sparse_step": step, "mlp_only_layers": listed}))
    assert config.dense_layers == dense
    assert config.intermediate_size == (384 if dense else 0)


def test_end_of_sequence_and_sampling_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 9], "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    config = read_config(write(tmp_path, {"eos_token_id": 3}, (), generation))
    assert config.eos_token_ids == (7, 9)
    assert config.generation == GenerationDefaults(temperature=0.7, top_k=20, top_p=0.8)


def test_without_a_generation_config_the_config_names_the_end(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {"eos_token_id": 3}))
    assert config.eos_token_ids == (3,)
    assert config.generation == GenerationDefaults()


def test_the_most_ends_of_sequence_are_served_and_one_more_is_refused_by_name(tmp_path: Path) -> None:
    """A row of the stop table holds these and the request's own, so more would take the rank down with everyone."""
    most = list(range(MAX_EOS_IDS))
    assert read_config(write(tmp_path, {}, (), {"eos_token_id": [*most, *most]})).eos_token_ids == tuple(most)
    write(tmp_path, {}, (), {"eos_token_id": [*most, MAX_EOS_IDS]})
    with pytest.raises(
        LoadError, match=rf"generation_config\.json: eos_token_id is .*at most {MAX_EOS_IDS} are served"
    ):
        read_config(tmp_path)


@pytest.mark.parametrize("held", [False, True])
def test_the_files_decide_on_mtp_where_the_config_is_silent(tmp_path: Path, held: bool) -> None:
    path = write(tmp_path, {}, ("num_nextn_predict_layers",))
    assert read_config(path, ["mtp.fc.weight"] if held else ["model.norm.weight"]).num_mtp_layers == int(held)


@pytest.mark.parametrize(
    ("changes", "drop", "message"),
    [
        ({"model_type": "llama"}, (), r'model_type is "llama"; served: qwen3_next'),
        ({}, ("model_type",), "model_type is missing; it must be set"),
        ({}, ("hidden_size",), "hidden_size is missing; it must be set"),
        ({"hidden_size": "192"}, (), 'hidden_size is "192"; it must be an integer'),
        ({"hidden_size": True}, (), "hidden_size is true; it must be an integer"),
        ({"num_experts": 0}, (), "num_experts is 0; it must be at least 1"),
        ({"num_experts_per_tok": 9}, (), "num_experts_per_tok is 9; it must be at most 8"),
        ({"num_attention_heads": 5}, (), "num_attention_heads is 5; it must be a multiple of num_key_value_heads"),
        ({"linear_num_value_heads": 3}, (), "linear_num_value_heads is 3; .* linear_num_key_heads, which is 2"),
        ({"rms_norm_eps": "tiny"}, (), 'rms_norm_eps is "tiny"; it must be a number'),
        ({"norm_topk_prob": 1}, (), "norm_topk_prob is 1; it must be true or false"),
        ({"attention_bias": True}, (), "attention_bias is true; only projections without bias"),
        ({"use_sliding_window": True}, (), "use_sliding_window is true; only full attention"),
        ({"hidden_act": "gelu"}, (), 'hidden_act is "gelu"; served: silu'),
        ({"quantization_config": {"quant_method": "fp8"}}, (), "quantization_config is .*fp8.*; only unquantised"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            (),
            'rope_scaling: rope_type is "yarn"; served: default',
        ),
        ({"rope_scaling": {"type": "linear"}}, (), 'rope_scaling: type is "linear"; served: default'),
        ({"rope_parameters": {"rope_type": "llama3"}}, (), 'rope_parameters: rope_type is "llama3"; served: default'),
        ({"rope_scaling": "yarn"}, (), 'rope_scaling is "yarn"; it must be an object'),
        ({}, ("rope_theta",), "rope_theta is missing"),
        ({"partial_rotary_factor": 0.02}, (), "partial_rotary_factor is 0.02; it rotates 1 of head_dim 64"),
        ({"layer_types": ["mamba"] * 6}, (), "layer_types is .*; it must be a list of linear_attention and full_att"),
        (
            {"layer_types": ["full_attention"]},
            (),
            "layer_types is .*; it must have num_hidden_layers entries: 6, not 1",
        ),
        ({"mlp_only_layers": [6]}, (), r"mlp_only_layers is \[6\]; every entry must be a layer from 0 to 5"),
        ({"mlp_only_layers": ["0"]}, (), "mlp_only_layers is .*; it must be an integer or a list of integers"),
        ({"torch_dtype": "float8_e4m3fn"}, (), "torch_dtype is .*; served: float32, bfloat16, float16"),
        ({"num_nextn_predict_layers": 2}, (), "num_nextn_predict_layers is 2; at most one MTP layer is served"),
        ({"eos_token_id": 4096}, (), "eos_token_id is 4096; token ids run from 0 to 4095"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], drop: tuple[str, ...], message: str
) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        read_config(write(tmp_path, changes, drop))
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": -1}, "temperature is -1; it must be between 0.0"),
        ({"top_p": 2}, "top_p is 2; it must be between 0.0 and 1.0"),
        ({"top_k": 0.5}, "top_k is 0.5; it must be an integer"),
        ([], "generation_config.json holds a list; a JSON object is needed"),
    ],
)
def test_a_malformed_generation_config_is_refused_by_name(tmp_path: Path, generation: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        read_config(write(tmp_path, {}, (), generation))
    assert "generation_config.json" in str(caught.value)


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"nowhere is not a directory; set model\.path"):
        read_config(tmp_path / "nowhere")


def test_a_missing_or_broken_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"config\.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)
