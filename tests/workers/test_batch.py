"""Rows to buckets and back: nothing lost, nothing mixed, nobody padded beyond a neighbour's class."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.batch import GROWTH, NARROW, SHORT, Batch, build_batch, lay_out, stage_layout

SEQUENCES = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 700)), min_size=1, max_size=12)


def built(counts: list[int], committed: list[int], *, bounds: list[int] | None = None, multiple: int = 1) -> Batch:
    bounds = bounds or counts
    layout = lay_out(bounds, [c + n for c, n in zip(committed, bounds, strict=True)], exact=bounds == counts)
    slots_B, order_B, base_B = stage_layout(layout, range(1, len(counts) + 1), torch.device("cpu"))
    return build_batch(
        layout,
        slots_B=slots_B,
        order_B=order_B,
        base_B=base_B,
        counts_B=torch.tensor(counts),
        committed_B=torch.tensor(committed),
        num_real=sum(bounds),
        row_multiple=multiple,
    )


def expected_rows(counts: list[int], committed: list[int]) -> list[tuple[int, int]]:
    """(slot, position) of every real row."""
    return [(i + 1, c + j) for i, (n, c) in enumerate(zip(counts, committed, strict=True)) for j in range(n)]


@given(SEQUENCES, st.sampled_from((1, 32)), st.data())
def test_every_row_goes_to_one_cell_and_back(
    sequences: list[tuple[int, int]], multiple: int, data: st.DataObject
) -> None:
    counts, committed = [n for n, _ in sequences], [c for _, c in sequences]
    bounds = [n + data.draw(st.integers(0, 8)) for n in counts] if data.draw(st.booleans()) else counts
    batch = built(counts, committed, bounds=bounds, multiple=multiple)
    assert batch.num_rows % multiple == 0
    real = batch.real_N.nonzero().view(-1)
    rows = list(zip(batch.slot_N[real].tolist(), batch.position_N[real].tolist(), strict=True))
    assert rows == expected_rows(counts, committed)
    padding = ~batch.real_N
    assert not batch.slot_N[padding].any()
    assert not batch.position_N[padding].any()
    tags_N = torch.arange(batch.num_rows)
    cells = [bucket.gather(tags_N) for bucket in batch.buckets]
    assert torch.equal(batch.scatter(cells)[real], tags_N[real])
    members = torch.cat([bucket.members_B for bucket in batch.buckets])
    assert sorted(members.tolist()) == list(range(len(counts)))
    for bucket, cell in zip(batch.buckets, cells, strict=True):
        for place, column in enumerate(bucket.members_B.tolist()):
            assert int(bucket.slots_B[place]) == column + 1
            own = [i for i in real.tolist() if int(batch.column_N[i]) == column]
            assert cell[place, : counts[column]].tolist() == own


@given(SEQUENCES)
def test_nobody_pays_for_a_neighbour_more_than_a_class(sequences: list[tuple[int, int]]) -> None:
    counts, committed = [n for n, _ in sequences], [c for _, c in sequences]
    batch = built(counts, committed)
    for bucket in batch.buckets:
        for column in bucket.members_B.tolist():
            assert bucket.width <= max(GROWTH * counts[column], NARROW)
            assert bucket.part.length <= max(GROWTH * (committed[column] + counts[column]), SHORT)
    assert len(batch.buckets) <= 2 * 2 * 2, "buckets grow with classes, not with sequences"


def test_one_dense_bucket_is_a_view() -> None:
    batch = built([3, 3, 3], [5, 9, 2])
    rows = torch.arange(9.0)
    (bucket,) = batch.buckets
    assert bucket.dense
    assert bucket.gather(rows).data_ptr() == rows.data_ptr()
    assert batch.scatter([bucket.gather(rows)]).data_ptr() == rows.data_ptr()


def test_moving_on_by_a_position() -> None:
    batch = built([1, 1], [4, 70], multiple=32).next_position()
    assert batch.position_N[:2].tolist() == [5, 71]
    assert not batch.position_N[2:].any()
    assert batch.committed_B.tolist() == [5, 71]
