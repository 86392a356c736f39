"""Mixture-of-experts models as numbers of parameters and bytes, layer kind by layer kind. Knows no machine.

Parameter counts of one layer; norms, biases and routers are left out, which are below a thousandth of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """hidden: width of the residual stream. vocab: of embedding and head, which are apart.

    attention_layers: with a cache per token. attention_params: of one. cache_values: that one keeps per token.
    cache_shards: ranks that can hold a part of a token's cache each; beyond, and for a latent cache (1), copies.
    attention_flops: of one layer, per row and token of context: scores and weighted sum over all query heads.
    recurrent_layers, recurrent_params: layers of linear attention. state_values: float32, of one layer and sequence.
    record_values: that one layer keeps of a row until it is committed.
    dense_layers, dense_params: feed-forward layers without experts.
    moe_layers: with `experts` experts of `expert_params`, of which a row goes to `active`, and shared_params for all.
    draft_projection: parameters before the one layer of the drafter, which has an attention and a mixture of its own.
    """

    name: str
    hidden: int
    vocab: int
    attention_layers: int
    attention_params: int
    cache_values: int
    cache_shards: int
    attention_flops: int
    recurrent_layers: int = 0
    recurrent_params: int = 0
    state_values: int = 0
    record_values: int = 0
    dense_layers: int = 0
    dense_params: int = 0
    moe_layers: int
    experts: int
    active: int
    expert_params: int
    shared_params: int
    draft_projection: int

    @property
    def num_layers(self) -> int:
        return self.attention_layers + self.recurrent_layers

    @property
    def num_params(self) -> int:
        """Of the target, embedding and head included."""
        return (
            2 * self.vocab * self.hidden
            + self.attention_layers * self.attention_params
            + self.recurrent_layers * self.recurrent_params
            + self.dense_layers * self.dense_params
            + self.moe_layers * (self.experts * self.expert_params + self.shared_params)
        )


def gqa(hidden: int, heads: int, kv_heads: int, head_dim: int, *, gated: bool = False) -> int:
    """Parameters of grouped-query attention; `gated`: with an output gate as wide as the queries."""
    return hidden * head_dim * (heads * (2 + gated) + 2 * kv_heads)


def mla(hidden: int, heads: int, query_rank: int, kv_rank: int, nope: int, rope: int, value: int) -> int:
    """Parameters of multi-head latent attention (DeepSeek-V2, 2405.04434, §2.1)."""
    queries = hidden * query_rank + query_rank * heads * (nope + rope)
    keys_and_values = hidden * (kv_rank + rope) + kv_rank * heads * (nope + value)
    return queries + keys_and_values + heads * value * hidden


def gated_delta(hidden: int, key_heads: int, value_heads: int, head_dim: int) -> int:
    """Parameters of a gated delta layer: queries, keys, values and gate in, values out; its convolution and scalars are
    left out."""
    return hidden * head_dim * (2 * key_heads + 3 * value_heads)


GEOMETRIES: dict[str, Geometry] = {
    geometry.name: geometry
    for geometry in (
        # DeepSeek-V3 (2412.19437, §4.2): 671 B, the first three layers dense. The cache holds 512 + 64 values, which
        # each of 128 heads reads whole: (576 + 512) multiply-adds per token of context.
        Geometry(
            name="deepseek-v3",
            hidden=7168,
            vocab=129280,
            attention_layers=61,
            attention_params=mla(7168, 128, 1536, 512, 128, 64, 128),
            cache_values=576,
            cache_shards=1,
            attention_flops=2 * 128 * (576 + 512),
            dense_layers=3,
            dense_params=3 * 7168 * 18432,
            moe_layers=58,
            experts=256,
            active=8,
            expert_params=3 * 7168 * 2048,
            shared_params=3 * 7168 * 2048,
            draft_projection=2 * 7168 * 7168,
        ),
        # Qwen3-Next-80B-A3B: 48 layers, every fourth with attention; 512 experts of which 10 and a shared one.
        Geometry(
            name="qwen3-next",
            hidden=2048,
            vocab=151936,
            attention_layers=12,
            attention_params=gqa(2048, 16, 2, 256, gated=True),
            cache_values=2 * 2 * 256,
            cache_shards=2,
            attention_flops=4 * 16 * 256,
            recurrent_layers=36,
            recurrent_params=gated_delta(2048, 16, 32, 128),
            state_values=32 * 128 * 128,
            record_values=128 * (16 + 32) + 2 * 32,
            moe_layers=48,
            experts=512,
            active=10,
            expert_params=3 * 2048 * 512,
            shared_params=3 * 2048 * 512,
            draft_projection=2 * 2048 * 2048,
        ),
        # The bundled demo, by configs/models/demo/config.json.
        Geometry(
            name="demo",
            hidden=192,
            vocab=4096,
            attention_layers=2,
            attention_params=gqa(192, 4, 2, 64, gated=True),
            cache_values=2 * 2 * 64,
            cache_shards=2,
            attention_flops=4 * 4 * 64,
            recurrent_layers=4,
            recurrent_params=gated_delta(192, 2, 4, 64),
            state_values=4 * 64 * 64,
            record_values=64 * (2 + 4) + 2 * 4,
            moe_layers=6,
            experts=8,
            active=2,
            expert_params=3 * 192 * 128,
            shared_params=3 * 192 * 128,
            draft_projection=2 * 192 * 192,
        ),
    )
}
