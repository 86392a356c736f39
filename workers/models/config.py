"""What config.json and generation_config.json say of a Qwen3-Next checkpoint, checked. No tensors, no torch.

A field that would change the arithmetic in a way that is not served is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from workers.models.fields import Fields, read_json
from workers.plan import MAX_EOS_IDS

SERVED_MODEL_TYPES = ("qwen3_next",)

MTP_PREFIX = "mtp."
"""Published tensors of the multi-token-prediction module; left on disk where nothing drafts."""

CONFIDENCE_WEIGHT = "mtp.confidence_head.proj.weight"
CONFIDENCE_BIAS = "mtp.confidence_head.proj.bias"
"""Optional: a head that tells how likely the next draft is to stand, and its bias."""

LayerType = Literal["linear_attention", "full_attention"]

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling parameters that the checkpoint recommends; None where it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig:
    """Shapes and constants of the model. Sizes are in elements, counts of heads and experts are over all ranks.

    layer_types: one per target layer.
    rotary_dim: leading elements of a head that are rotated.
    lin_*: Gated DeltaNet layers; key head j serves value heads j·r .. j·r + r − 1 with r = values_per_key.
    expert_size, shared_size, intermediate_size: inner widths of a routed expert, the shared expert, a dense layer.
    norm_topk_prob: the router's chosen probabilities are scaled to sum to one.
    dense_layers: target layers with one dense SwiGLU in place of experts; intermediate_size is 0 where there are none.
    tied: the output head is the embedding table.
    dtype: of the published weights: "float32", "bfloat16" or "float16".
    num_mtp_layers: 1 with a multi-token-prediction module, else 0.
    has_confidence_head, has_confidence_bias: what the files hold beside that module; config.json does not say.
    eos_token_ids: of generation_config.json, else of config.json; may be empty, distinct, at most MAX_EOS_IDS.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_types: tuple[LayerType, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    lin_key_heads: int
    lin_value_heads: int
    lin_key_dim: int
    lin_value_dim: int
    conv_width: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int
    norm_topk_prob: bool
    dense_layers: tuple[int, ...]
    intermediate_size: int
    tied: bool
    context_length: int
    dtype: str
    num_mtp_layers: int
    has_confidence_head: bool
    has_confidence_bias: bool
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults

    @property
    def values_per_key(self) -> int:
        """Value heads that one key head of a Gated DeltaNet layer serves."""
        return self.lin_value_heads // self.lin_key_heads

    @property
    def conv_channels(self) -> int:
        """Channels [q | k | v] of the causal convolution."""
        return 2 * self.lin_key_heads * self.lin_key_dim + self.lin_value_heads * self.lin_value_dim


def read_config(path: Path, tensors: Collection[str] = ()) -> Qwen3NextConfig:
    """The configuration of the checkpoint in directory `path`.

    tensors: names of those that the files hold; they decide on the MTP module where config.json does not say.
    Raises LoadError, naming the field and the remedy, for what is missing, malformed or not served.
    """
    fields = Fields(path / "config.json", read_json(path / "config.json"))
    generation_path = path / "generation_config.json"
    generation = Fields(generation_path, read_json(generation_path) if generation_path.exists() else {})

    model_type = fields.choice("model_type", SERVED_MODEL_TYPES)
    _refuse_unserved(fields)
    vocab_size = fields.integer("vocab_size")
    num_layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim")
    num_experts = fields.integer("num_experts")
    dense_layers = _dense_layers(fields, num_layers)
    rope_theta, rotary_dim = _rotary(fields, head_dim)
    has_mtp_tensors = any(name.startswith(MTP_PREFIX) for name in tensors)
    num_mtp_layers = fields.integer("num_nextn_predict_layers", int(has_mtp_tensors), minimum=0)
    if num_mtp_layers > 1:
        raise fields.error("num_nextn_predict_layers", "at most one MTP layer is served")
    return Qwen3NextConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        num_layers=num_layers,
        layer_types=_layer_types(fields, num_layers),
        num_heads=fields.multiple("num_attention_heads", "num_key_value_heads"),
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        rms_norm_eps=fields.number("rms_norm_eps"),
        lin_key_heads=fields.integer("linear_num_key_heads"),
        lin_value_heads=fields.multiple("linear_num_value_heads", "linear_num_key_heads"),
        lin_key_dim=fields.integer("linear_key_head_dim"),
        lin_value_dim=fields.integer("linear_value_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim", minimum=2),
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", maximum=num_experts),
        expert_size=fields.integer("moe_intermediate_size"),
        shared_size=fields.integer("shared_expert_intermediate_size"),
        norm_topk_prob=fields.boolean("norm_topk_prob", True),
        dense_layers=dense_layers,
        intermediate_size=fields.integer("intermediate_size") if dense_layers else 0,
        tied=fields.boolean("tie_word_embeddings", False),
        context_length=fields.integer("max_position_embeddings"),
        dtype=_dtype(fields),
        num_mtp_layers=num_mtp_layers,
        has_confidence_head=CONFIDENCE_WEIGHT in tensors,
        has_confidence_bias=CONFIDENCE_BIAS in tensors,
        eos_token_ids=_eos_token_ids(generation, vocab_size) or _eos_token_ids(fields, vocab_size),
        generation=GenerationDefaults(
            temperature=generation.maybe_number("temperature"),
            top_k=generation.maybe_integer("top_k", minimum=0),
            top_p=generation.maybe_number("top_p", maximum=1.0),
        ),
    )


def _refuse_unserved(fields: Fields) -> None:
    """Refuses what Qwen3-Next itself does not have or what is not served of it."""
    fields.choice("hidden_act", ("silu",), "silu")
    if fields.boolean("attention_bias", False):
        raise fields.error("attention_bias", "only projections without bias are served")
    if fields.boolean("use_sliding_window", False):
        raise fields.error("use_sliding_window", "only full attention windows are served")
    for name in ("quantization_config", "compression_config"):
        if fields.get(name) is not None:
            raise fields.error(name, "only unquantised bfloat16, float16 or float32 weights are served")


def _layer_types(fields: Fields, num_layers: int) -> tuple[LayerType, ...]:
    """`layer_types`, or every `full_attention_interval`-th layer with full attention."""
    listed = fields.get("layer_types")
    if listed is None:
        interval = fields.integer("full_attention_interval", 4)
        return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers))
    served = get_args(LayerType)
    if not isinstance(listed, list) or any(kind not in served for kind in listed):
        raise fields.error("layer_types", f"it must be a list of {' and '.join(served)}")
    if len(listed) != num_layers:
        raise fields.error("layer_types", f"it must have num_hidden_layers entries: {num_layers}, not {len(listed)}")
    return tuple(listed)


def _dense_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Layers without experts: those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    step = fields.integer("decoder_sparse_step", 1)
    listed = fields.integers("mlp_only_layers")
    if any(not 0 <= layer < num_layers for layer in listed):
        raise fields.error("mlp_only_layers", f"every entry must be a layer from 0 to {num_layers - 1}")
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)


def _rotary(fields: Fields, head_dim: int) -> tuple[float, int]:
    """Base of the rotation and rotated elements per head, from either spelling:
    `rope_theta`, `rope_scaling` and `partial_rotary_factor` side by side, or inside `rope_parameters`."""
    scaling, parameters = fields.table("rope_scaling"), fields.table("rope_parameters")
    for table in (scaling, parameters):
        for name in ("rope_type", "type"):
            table.choice(name, ("default",), "default")
    theta = parameters.maybe_number("rope_theta")
    if theta is None:
        theta = fields.number("rope_theta")
    factor = parameters.maybe_number("partial_rotary_factor", maximum=1.0)
    if factor is None:
        factor = fields.maybe_number("partial_rotary_factor", maximum=1.0)
    rotary_dim = int(head_dim * (0.25 if factor is None else factor))
    if rotary_dim < 2 or rotary_dim % 2:
        raise fields.error("partial_rotary_factor", f"it rotates {rotary_dim} of head_dim {head_dim}; pairs are needed")
    return theta, rotary_dim


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if isinstance(value, str) and value.startswith("torch."):
        return fields.choice(name, tuple(f"torch.{dtype}" for dtype in _DTYPES)).removeprefix("torch.")
    return fields.choice(name, _DTYPES, "float32")


def _eos_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = tuple(dict.fromkeys(fields.integers("eos_token_id")))
    if any(not 0 <= token < vocab_size for token in ids):
        raise fields.error("eos_token_id", f"token ids run from 0 to {vocab_size - 1}")
    if len(ids) > MAX_EOS_IDS:
        raise fields.error("eos_token_id", f"{len(ids)} ids, and at most {MAX_EOS_IDS} are served; name fewer")
    return ids
