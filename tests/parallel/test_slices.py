"""Partitions keep every row on exactly one rank, or on all ranks that share it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel import slices
from parallel.slices import WHOLE, Shard, Span

SIZES = st.sampled_from([1, 2, 4])


def shards(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]


def rows(spans: list[Span]) -> list[int]:
    return [row for span in spans for row in range(*span)]


@given(SIZES, st.integers(1, 50))
def test_even_parts_tile_the_dimension_in_rank_order(size: int, part: int) -> None:
    spans = [slices.even(size * part, shard, "rows") for shard in shards(size)]
    assert rows(spans) == list(range(size * part))
    assert {span.length for span in spans} == {part}


def test_a_remainder_is_refused_by_the_name_of_what_is_cut() -> None:
    with pytest.raises(ValueError, match="9 attention heads cannot be cut evenly over 2 ranks"):
        slices.even(9, Shard(0, 2), "attention heads")


@given(SIZES, SIZES, st.integers(1, 6))
def test_a_rank_keeps_the_kv_heads_its_query_heads_read(size: int, count: int, ratio: int) -> None:
    heads = count * ratio * size  # divisible by both
    kept = []
    for shard in shards(size):
        read = {head // (heads // count) for head in range(*slices.even(heads, shard, "heads"))}
        span = slices.kv_heads(count, shard)
        assert read == set(range(*span))
        kept.extend(range(*span))
    copies = max(1, size // count)
    assert sorted(kept) == sorted(list(range(count)) * copies)


@pytest.mark.parametrize(("count", "size"), [(3, 2), (3, 4)])
def test_kv_heads_that_fit_neither_way_are_refused(count: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"{count} key/value heads"):
        slices.kv_heads(count, Shard(0, size))


@given(SIZES, st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_every_segment_is_cut_by_itself(size: int, parts: list[int]) -> None:
    lengths = [part * size for part in parts]
    by_rank = [slices.segments(lengths, shard, "channels") for shard in shards(size)]
    for i, length in enumerate(lengths):
        start = sum(lengths[:i])
        assert rows([spans[i] for spans in by_rank]) == list(range(start, start + length))


@given(SIZES, st.integers(0, 40))
def test_experts_are_spread_as_evenly_as_they_can_be(size: int, extra: int) -> None:
    spans = [slices.experts(size + extra, shard) for shard in shards(size)]
    assert rows(spans) == list(range(size + extra))
    counts = [span.length for span in spans]
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1


def test_a_rank_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="3 experts are too few for 4 ranks"):
        slices.experts(3, Shard(3, 4))


@given(st.sampled_from([2, 4]), st.integers(1, 2000))
def test_a_cut_vocabulary_is_padded_to_equal_multiples_of_64(size: int, count: int) -> None:
    parts = [slices.vocabulary(count, shard) for shard in shards(size)]
    assert rows([part.rows for part in parts]) == list(range(count))
    lengths = {part.rows.length + part.padding for part in parts}
    assert len(lengths) == 1
    assert lengths.pop() % 64 == 0
    assert sum(part.padding for part in parts) < 64 * size


def test_one_rank_keeps_the_vocabulary_as_published() -> None:
    part = slices.vocabulary(509, WHOLE)
    assert (part.rows, part.padding) == (Span(0, 509), 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_shard_is_one_of_its_ranks(rank: int) -> None:
    with pytest.raises(ValueError, match="not one of 2 ranks"):
        Shard(rank, 2)
