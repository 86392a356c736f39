"""Which part of a dimension each rank keeps. Pure functions on integers; knows no tensors, no model and no network.

Every function cuts [0, length) for one shard and returns the half-open part that stays there:

    even        n = 8, size 4      [0,2) [2,4) [4,6) [6,8)         column, row and head partitions
    kv_heads    2 heads, size 4    [0,1) [0,1) [1,2) [1,2)         neighbours share a head when there are too few
    segments    4|4|8, size 2      [0,2)[4,6)[8,12)  [2,4)[6,8)[12,16)
    experts     7, size 3          [0,3) [3,5) [5,7)               the remainder goes to the first ranks
    vocabulary  509, size 2        [0,256) [256,509) + 3 rows of padding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

VOCABULARY_UNIT = 64
"""A vocabulary that is cut is padded so that every rank's part is a multiple of this many rows."""


class Span(NamedTuple):
    """The half-open range [start, stop) of one dimension."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def scaled(self, unit: int) -> Span:
        """The same heads (or other units) counted in rows of `unit` each."""
        return Span(self.start * unit, self.stop * unit)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` ranks that cut a tensor between them."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not one of {self.size} ranks")


WHOLE = Shard(0, 1)
"""The shard that keeps everything."""


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """A rank's rows of an embedding table or output head.

    rows: the published rows it keeps; may be empty on the last ranks.
    padding: rows of zeros after them, without a token.
    """

    rows: Span
    padding: int


def even(length: int, shard: Shard, what: str) -> Span:
    """Equal contiguous parts. Raises ValueError, naming `what`, where they cannot be equal."""
    if length % shard.size:
        raise ValueError(f"{length} {what} cannot be cut evenly over {shard.size} ranks")
    part = length // shard.size
    return Span(shard.rank * part, (shard.rank + 1) * part)


def kv_heads(count: int, shard: Shard) -> Span:
    """Key/value heads: equal parts, or one head shared by size / count neighbouring ranks.

    Either way a rank's query heads, cut evenly, read only the heads it keeps. Raises ValueError where neither the count
    is a multiple of the size nor the size of the count.
    """
    if count >= shard.size:
        return even(count, shard, "key/value heads")
    if shard.size % count:
        raise ValueError(f"{count} key/value heads cannot be shared evenly by {shard.size} ranks")
    head = shard.rank * count // shard.size
    return Span(head, head + 1)


def segments(lengths: Sequence[int], shard: Shard, what: str) -> tuple[Span, ...]:
    """A concatenation of segments, each cut evenly: one contiguous part would mix segments between ranks."""
    spans = []
    start = 0
    for length in lengths:
        part = even(length, shard, what)
        spans.append(Span(start + part.start, start + part.stop))
        start += length
    return tuple(spans)


def experts(count: int, shard: Shard) -> Span:
    """Contiguous experts; the first count % size ranks keep one more. Raises ValueError where a rank has none."""
    if count < shard.size:
        raise ValueError(f"{count} experts are too few for {shard.size} ranks; every rank keeps at least one")
    part, remainder = divmod(count, shard.size)
    start = shard.rank * part + min(shard.rank, remainder)
    return Span(start, start + part + (shard.rank < remainder))


def vocabulary(count: int, shard: Shard) -> VocabularyPart:
    """Token rows. One rank keeps the published table as it is; several pad it to equal multiples of VOCABULARY_UNIT."""
    if shard.size == 1:
        return VocabularyPart(Span(0, count), 0)
    unit = shard.size * VOCABULARY_UNIT
    part = -(-count // unit) * VOCABULARY_UNIT
    start = min(shard.rank * part, count)
    stop = min(start + part, count)
    return VocabularyPart(Span(start, stop), part - (stop - start))
