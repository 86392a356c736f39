"""What a layer keeps per sequence and per token, in shapes and bytes. No torch; knows no family and no allocator.

A layer owns a *list* of specs. Pools, digests, accounting and export loop over these lists and over nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

TARGET_GROUP = "target"
DRAFTER_GROUP = "drafter"


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKVSpec:
    """Keys and values of grouped-query attention, paged. One page holds [2, page_size, num_kv_heads, head_dim]."""

    group: str
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """The last width − 1 inputs of a causal depthwise convolution: [width − 1, channels] per sequence."""

    channels: int
    width: int
    dtype: str

    @property
    def bytes_per_slot(self) -> int:
        return (self.width - 1) * self.channels * ITEMSIZE[self.dtype]

    @property
    def bytes_per_record(self) -> int:
        return self.channels * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """Recurrent matrix of Gated DeltaNet: [num_value_heads, key_dim, value_dim] float32 per sequence.

    A record is the raw input of one token: k [num_key_heads, key_dim], v [num_value_heads, value_dim], beta and decay
    [num_value_heads], all float32.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def bytes_per_slot(self) -> int:
        return 4 * self.num_value_heads * self.key_dim * self.value_dim

    @property
    def bytes_per_record(self) -> int:
        return 4 * (self.num_key_heads * self.key_dim + self.num_value_heads * (self.value_dim + 2))


StateSpec = PagedKVSpec | ConvSpec | GatedDeltaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """The specs of all layers, drafter layers included (their KV carries group DRAFTER_GROUP).

    layers: one tuple of specs per layer, target layers first.
    hidden_size, vocab_size: width of what else a running sequence keeps (hidden window, draft laws).
    """

    layers: tuple[tuple[StateSpec, ...], ...]
    hidden_size: int
    vocab_size: int
    activation_dtype: str

    @property
    def cache_groups(self) -> tuple[str, ...]:
        """Names of the paged groups, the target's first."""
        names = {spec.group for specs in self.layers for spec in specs if isinstance(spec, PagedKVSpec)}
        return tuple(name for name in (TARGET_GROUP, DRAFTER_GROUP) if name in names)

    def kv_bytes_per_token(self, group: str) -> int:
        return sum(
            spec.bytes_per_token
            for specs in self.layers
            for spec in specs
            if isinstance(spec, PagedKVSpec) and spec.group == group
        )

    @property
    def state_bytes_per_slot(self) -> int:
        """Recurrent and convolution state of one sequence."""
        return sum(spec.bytes_per_slot for specs in self.layers for spec in specs if not isinstance(spec, PagedKVSpec))

    @property
    def record_bytes_per_row(self) -> int:
        """Raw inputs recorded for one token row of a pass."""
        return sum(
            spec.bytes_per_record for specs in self.layers for spec in specs if not isinstance(spec, PagedKVSpec)
        )
