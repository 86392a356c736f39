"""The loading table of Qwen3-Next: published names, our parameters, and what a rank keeps. No torch, no file.

Published layouts that differ from ours, for key head j, r = value heads per key head:

    self_attn.q_proj           per head [q D | gate D]                           → all q; all gates, after k and v
    linear_attn.in_proj_qkvz   per key head [q Dk | k Dk | v r·Dv | z r·Dv]      → all q, all k, all v, all z
    linear_attn.in_proj_ba     per key head [b r | a r]                          → all b, all a
    linear_attn.conv1d         [channels q|k|v, 1, width]                        → [channels, width]
    mlp.experts.{e}.*          one tensor per expert                             → stacks over experts, gate above up

Key head j serves value heads j·r .. j·r + r − 1, so "all v" in order of key heads is also the order of value heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallel import slices
from parallel.slices import WHOLE, Shard, Span
from workers.models.config import CONFIDENCE_BIAS, CONFIDENCE_WEIGHT, Qwen3NextConfig
from workers.models.rules import Piece, TensorRule, box, table_shapes


def tensor_table(
    config: Qwen3NextConfig, shard: Shard = WHOLE, expert_shard: Shard | None = None
) -> tuple[TensorRule, ...]:
    """One rule per tensor of the checkpoint, MTP module included where config.num_mtp_layers is 1.

    shard: the rank among those that cut attention, recurrence, dense layers and vocabulary between them.
    expert_shard: the rank among those that own whole experts; None cuts every expert over `shard` instead.
    Raises ValueError where the model's shapes cannot be cut so.
    """
    rules = [_vocabulary("model.embed_tokens.weight", "embed.weight", config, shard)]
    if not config.tied:
        rules.append(_vocabulary("lm_head.weight", "lm_head.weight", config, shard))
    rules.append(_copy("model.norm.weight", "norm.weight", config.hidden_size))
    for i, kind in enumerate(config.layer_types):
        dense = i in config.dense_layers
        rules.extend(_layer(f"model.layers.{i}.", f"layers.{i}.", config, kind, dense, shard, expert_shard))
    if config.num_mtp_layers:
        rules.extend(_mtp(config, shard, expert_shard))
    return tuple(rules)


def parameter_shapes(
    config: Qwen3NextConfig, shard: Shard = WHOLE, expert_shard: Shard | None = None
) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of this rank, by name."""
    return table_shapes(tensor_table(config, shard, expert_shard))


def _mtp(config: Qwen3NextConfig, shard: Shard, expert_shard: Shard | None) -> Iterator[TensorRule]:
    """The MTP module: [embedding ; hidden] → fc → one block of full attention and experts → norm, and a confidence head
    on the normed hidden state where the checkpoint has one."""
    hidden = config.hidden_size
    yield _copy("mtp.pre_fc_norm_embedding.weight", "mtp.embed_norm.weight", hidden)
    yield _copy("mtp.pre_fc_norm_hidden.weight", "mtp.hidden_norm.weight", hidden)
    yield _copy("mtp.fc.weight", "mtp.fc.weight", hidden, 2 * hidden)
    yield from _layer("mtp.layers.0.", "mtp.layer.", config, "full_attention", False, shard, expert_shard)
    yield _copy("mtp.norm.weight", "mtp.norm.weight", hidden)
    if config.has_confidence_head:
        yield _copy(CONFIDENCE_WEIGHT, "mtp.confidence.weight", 1, hidden)
        if config.has_confidence_bias:
            yield _copy(CONFIDENCE_BIAS, "mtp.confidence.bias", 1)


def _layer(
    theirs: str, ours: str, config: Qwen3NextConfig, kind: str, dense: bool, shard: Shard, expert_shard: Shard | None
) -> Iterator[TensorRule]:
    yield _copy(f"{theirs}input_layernorm.weight", f"{ours}input_norm.weight", config.hidden_size)
    yield _copy(f"{theirs}post_attention_layernorm.weight", f"{ours}post_norm.weight", config.hidden_size)
    if kind == "full_attention":
        yield from _attention(f"{theirs}self_attn.", f"{ours}mixer.", config, shard)
    else:
        yield from _gated_delta(f"{theirs}linear_attn.", f"{ours}mixer.", config, shard)
    if dense:
        size = config.intermediate_size
        yield from _swiglu(f"{theirs}mlp.", f"{ours}mlp.gate_up", f"{ours}mlp.down", config, size, shard)
    else:
        yield from _experts(f"{theirs}mlp.", f"{ours}mlp.", config, shard, expert_shard)


def _attention(theirs: str, ours: str, config: Qwen3NextConfig, shard: Shard) -> Iterator[TensorRule]:
    dim, hidden = config.head_dim, config.hidden_size
    heads = slices.even(config.num_heads, shard, "attention heads")
    kv = slices.kv_heads(config.num_kv_heads, shard)
    in_proj = f"{ours}in_proj.weight"
    k_row = heads.length * dim
    gate_row = k_row + 2 * kv.length * dim
    pieces = []
    for local, head in enumerate(range(*heads)):
        row = head * 2 * dim
        pieces.append(_rows(row, local * dim, dim, hidden))
        pieces.append(_rows(row + dim, gate_row + local * dim, dim, hidden))
    q_shape = (config.num_heads * 2 * dim, hidden)
    yield TensorRule(published=f"{theirs}q_proj.weight", parameter=in_proj, shape=q_shape, pieces=tuple(pieces))
    kv_shape, kv_rows = (config.num_kv_heads * dim, hidden), kv.length * dim
    for name, row in (("k_proj", k_row), ("v_proj", k_row + kv_rows)):
        kept = (_rows(kv.start * dim, row, kv_rows, hidden),)
        yield TensorRule(published=f"{theirs}{name}.weight", parameter=in_proj, shape=kv_shape, pieces=kept)
    yield _copy(f"{theirs}q_norm.weight", f"{ours}q_norm.weight", dim)
    yield _copy(f"{theirs}k_norm.weight", f"{ours}k_norm.weight", dim)
    yield _columns(
        f"{theirs}o_proj.weight", f"{ours}out_proj.weight", hidden, config.num_heads * dim, heads.scaled(dim)
    )


def _gated_delta(theirs: str, ours: str, config: Qwen3NextConfig, shard: Shard) -> Iterator[TensorRule]:
    hidden, width, ratio = config.hidden_size, config.conv_width, config.values_per_key
    keys = slices.even(config.lin_key_heads, shard, "linear key heads")
    values = keys.scaled(ratio)
    key, value = config.lin_key_dim, ratio * config.lin_value_dim  # rows per key head
    in_proj = f"{ours}in_proj.weight"

    row = 0
    for name, parts in (("in_proj_qkvz", (key, key, value, value)), ("in_proj_ba", (ratio, ratio))):
        group = sum(parts)
        rows = []
        for p, size in enumerate(parts):
            for head in range(*keys):
                rows.append(_rows(head * group + sum(parts[:p]), row, size, hidden))
                row += size
        group_shape = (config.lin_key_heads * group, hidden)
        yield TensorRule(published=f"{theirs}{name}.weight", parameter=in_proj, shape=group_shape, pieces=tuple(rows))

    all_keys, all_values = config.lin_key_heads * key, config.lin_key_heads * value
    channels, channel = [], 0
    for span in slices.segments((all_keys, all_keys, all_values), shard, "convolution channels"):
        channels.append(Piece(box(span, 1, width), box(Span(channel, channel + span.length), width)))
        channel += span.length
    yield TensorRule(
        published=f"{theirs}conv1d.weight",
        parameter=f"{ours}conv.weight",
        shape=(config.conv_channels, 1, width),
        pieces=tuple(channels),
    )

    for published, parameter in (("A_log", "a_log"), ("dt_bias", "dt_bias")):
        kept = (Piece(box(values), box(values.length)),)
        shape = (config.lin_value_heads,)
        yield TensorRule(published=theirs + published, parameter=ours + parameter, shape=shape, pieces=kept)
    yield _copy(f"{theirs}norm.weight", f"{ours}norm.weight", config.lin_value_dim)
    yield _columns(f"{theirs}out_proj.weight", f"{ours}out_proj.weight", hidden, all_values, keys.scaled(value))


def _experts(
    theirs: str, ours: str, config: Qwen3NextConfig, shard: Shard, expert_shard: Shard | None
) -> Iterator[TensorRule]:
    hidden, size = config.hidden_size, config.expert_size
    owned = slices.experts(config.num_experts, expert_shard or WHOLE)
    kept = slices.even(size, shard, "rows of an expert") if expert_shard is None else Span(0, size)
    n = kept.length
    yield _copy(f"{theirs}gate.weight", f"{ours}router.weight", config.num_experts, hidden)
    for expert in range(config.num_experts):
        local = expert - owned.start
        place = Span(local, local + 1)
        gate_up, down = f"{ours}gate_up.weight", f"{ours}down.weight"
        for name, parameter, shape, piece in (
            ("gate_proj", gate_up, (size, hidden), Piece(box(kept, hidden), box(place, n, hidden))),
            ("up_proj", gate_up, (size, hidden), Piece(box(kept, hidden), box(place, Span(n, 2 * n), hidden))),
            ("down_proj", down, (hidden, size), Piece(box(hidden, kept), box(place, hidden, n))),
        ):
            published = f"{theirs}experts.{expert}.{name}.weight"
            pieces = (piece,) if owned.start <= expert < owned.stop else ()
            yield TensorRule(published=published, parameter=parameter, shape=shape, pieces=pieces)
    shared = f"{theirs}shared_expert."
    yield from _swiglu(shared, f"{ours}shared_gate_up", f"{ours}shared_down", config, config.shared_size, shard)
    yield _copy(f"{theirs}shared_expert_gate.weight", f"{ours}shared_gate.weight", 1, hidden)


def _swiglu(
    theirs: str, gate_up: str, down: str, config: Qwen3NextConfig, size: int, shard: Shard
) -> Iterator[TensorRule]:
    """A SwiGLU of inner width `size`: gate rows above up rows, and the projection back."""
    hidden = config.hidden_size
    kept = slices.even(size, shard, "rows of a dense layer")
    for name, row in (("gate_proj", 0), ("up_proj", kept.length)):
        pieces = (_rows(kept.start, row, kept.length, hidden),)
        published, parameter = f"{theirs}{name}.weight", f"{gate_up}.weight"
        yield TensorRule(published=published, parameter=parameter, shape=(size, hidden), pieces=pieces)
    yield _columns(f"{theirs}down_proj.weight", f"{down}.weight", hidden, size, kept)


def _vocabulary(published: str, parameter: str, config: Qwen3NextConfig, shard: Shard) -> TensorRule:
    hidden = config.hidden_size
    part = slices.vocabulary(config.vocab_size, shard)
    count = part.rows.length
    pieces = (_rows(part.rows.start, 0, count, hidden),) if count else ()
    padding = (box(Span(count, count + part.padding), hidden),) if part.padding else ()
    shape = (config.vocab_size, hidden)
    return TensorRule(published=published, parameter=parameter, shape=shape, pieces=pieces, padding=padding)


def _copy(published: str, parameter: str, *shape: int) -> TensorRule:
    """Kept whole by every rank."""
    pieces = (Piece(box(*shape), box(*shape)),)
    return TensorRule(published=published, parameter=parameter, shape=shape, pieces=pieces)


def _columns(published: str, parameter: str, num_rows: int, num_columns: int, kept: Span) -> TensorRule:
    """A projection whose inputs are cut: all rows, the columns `kept`."""
    pieces = (Piece(box(num_rows, kept), box(num_rows, kept.length)),)
    return TensorRule(published=published, parameter=parameter, shape=(num_rows, num_columns), pieces=pieces)


def _rows(source: int, target: int, count: int, width: int) -> Piece:
    """`count` whole rows from row `source` of the published tensor to row `target` of the parameter."""
    return Piece(box(Span(source, source + count), width), box(Span(target, target + count), width))
