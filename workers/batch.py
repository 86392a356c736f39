"""The rows of one pass as index tensors, built once per pass from lengths on the device. Knows no layers, no weights.

Rows are flat [N]; sequences own contiguous runs of them. Mixers need [B, W] instead: buckets hold sequences of about
one width and one length, so the number of torch calls grows with neither the sequences nor the rows, and nobody pays
for a neighbour's long chunk or long context more than fourfold. Bucket and row maps:

    flat rows      [ s0 s0 s0 | s1 | s2 s2 s2 s2 ... s2 | padding ]
    narrow bucket  B = {s0, s1}, W = 3      wide bucket  B = {s2}, W = 256

What the host knows is a Layout; what the device knows, a Batch. Building the second reads nothing back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NARROW = 16
"""Widest sequence of a narrow bucket; anything longer is a prefill chunk."""
SHORT = 256
"""Longest sequence of the shortest buckets."""
GROWTH = 4
"""Each class of widths and lengths reaches this many times as far as the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One bucket as the host sees it: columns order[start:stop] of the layout, padded to `width` cells.

    length: exclusive bound of the positions read and written. dense: the cells are rows [first_row, first_row + B·W),
    in order and without gaps, so that a view replaces a gather.
    """

    start: int
    stop: int
    width: int
    length: int
    dense: bool
    first_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which column goes to which bucket. base: by column, its first cell in the concatenation of the buckets' cells."""

    parts: tuple[Part, ...]
    order: tuple[int, ...]
    base: tuple[int, ...]
    num_cells: int


def lay_out(max_counts: Sequence[int], max_lengths: Sequence[int], *, exact: bool) -> Layout:
    """Sorts sequences into buckets by width and length.

    max_counts: host bounds of the rows of each sequence; `exact` promises that they are the rows. max_lengths:
    exclusive host bounds of its positions after the pass.
    """
    if not max_counts:
        return NOBODY
    groups: dict[tuple[int, int], list[int]] = {}
    for column, (count, length) in enumerate(zip(max_counts, max_lengths, strict=True)):
        groups.setdefault((_class(count, NARROW), _class(length, SHORT)), []).append(column)
    starts = [0]
    for count in max_counts:
        starts.append(starts[-1] + count)
    parts: list[Part] = []
    order: list[int] = []
    base = [0] * len(max_counts)
    num_cells = 0
    for _, members in sorted(groups.items()):
        width = max(max_counts[i] for i in members)
        in_a_row = members[-1] - members[0] + 1 == len(members)
        dense = exact and in_a_row and all(max_counts[i] == width for i in members)
        parts.append(
            Part(
                start=len(order),
                stop=len(order) + len(members),
                width=width,
                length=max(max_lengths[i] for i in members),
                dense=dense,
                first_row=starts[members[0]] if dense else 0,
            )
        )
        order += members
        for place, i in enumerate(members):
            base[i] = num_cells + place * width
        num_cells += len(members) * width
    return Layout(parts=tuple(parts), order=tuple(order), base=tuple(base), num_cells=num_cells)


NOBODY = Layout(
    parts=(Part(start=0, stop=0, width=1, length=1, dense=True, first_row=0),), order=(), base=(), num_cells=0
)
"""A pass without sequences: one bucket, of none. A rank runs it where others need its company in collectives."""


def _class(size: int, first: int) -> int:
    while size > first:
        first *= GROWTH
    return first


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Sequences processed at one padded width.

    members_B: their columns in the batch. slots_B: their slots. counts_B: their rows in this pass.
    rows_BW: flat row of each cell; cells beyond counts point at the sequence's first row.
    """

    part: Part
    members_B: Tensor
    slots_B: Tensor
    counts_B: Tensor
    rows_BW: Tensor

    @property
    def size(self) -> int:
        return self.part.stop - self.part.start

    @property
    def width(self) -> int:
        return self.part.width

    @property
    def is_wide(self) -> bool:
        """Prefill chunks only: every row is known and will be committed."""
        return self.part.width > NARROW

    @property
    def dense(self) -> bool:
        return self.part.dense

    @property
    def first_row(self) -> int:
        return self.part.first_row

    def gather(self, x_N: Tensor) -> Tensor:
        """[N, ...] → [B, W, ...]; cells that do not count hold some valid row."""
        tail = x_N.shape[1:]
        if self.part.dense:
            cells = x_N[self.part.first_row : self.part.first_row + self.size * self.width]
        else:
            cells = x_N.index_select(0, self.rows_BW.view(-1))
        return cells.view(self.size, self.width, *tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One pass.

    num_rows: flat rows, padding included. num_real: rows up to which something may be real (a host bound).
    slots_B, counts_B, starts_B, committed_B: per sequence, its slot, its rows in this pass, its first flat row and its
    committed length before the pass.
    column_N: sequence of each row; padding names the last one. slot_N: 0, the null slot, for padding.
    position_N: absolute position; 0 for padding. real_N: whether the row is real.
    scatter_N: where each flat row lies in the concatenation of the buckets' cells.
    """

    num_rows: int
    num_real: int
    slots_B: Tensor
    counts_B: Tensor
    starts_B: Tensor
    committed_B: Tensor
    column_N: Tensor
    slot_N: Tensor
    position_N: Tensor
    real_N: Tensor
    buckets: tuple[Bucket, ...]
    scatter_N: Tensor

    @property
    def max_length(self) -> int:
        """Exclusive host bound of all positions."""
        return max(bucket.part.length for bucket in self.buckets)

    def scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Bucket results [B, W, ...] back to flat rows [N, ...]; padding rows hold anything finite."""
        if len(parts) == 1 and self.buckets[0].dense and parts[0].shape[0] * parts[0].shape[1] == self.num_rows:
            return parts[0].reshape(self.num_rows, *parts[0].shape[2:])
        cells = torch.cat([part.reshape(-1, *part.shape[2:]) for part in parts])
        return cells.index_select(0, self.scatter_N)

    def next_position(self) -> Batch:
        """The same sequences and rows, each one position further on."""
        return replace(self, committed_B=self.committed_B + 1, position_N=self.position_N + self.real_N)


def build_batch(
    layout: Layout,
    *,
    slots_B: Tensor,
    order_B: Tensor,
    base_B: Tensor,
    counts_B: Tensor,
    committed_B: Tensor,
    num_real: int,
    row_multiple: int,
) -> Batch:
    """Index tensors of a pass; all arguments int64 on the device, order and base those of the layout.

    counts_B, committed_B: the truth, which the layout's bounds cover. num_real: host bound of sum(counts_B).
    row_multiple: flat rows are padded to a multiple of it.
    """
    device = counts_B.device
    num_rows = -(-num_real // row_multiple) * row_multiple
    ends_B = counts_B.cumsum(0)
    starts_B = ends_B - counts_B
    row_N = torch.arange(num_rows, device=device)
    column_N = torch.searchsorted(ends_B, row_N, right=True)
    real_N = column_N < len(layout.order)
    column_N = column_N.clamp_(max=len(layout.order) - 1)
    offset_N = row_N - starts_B.index_select(0, column_N)
    return Batch(
        num_rows=num_rows,
        num_real=num_real,
        slots_B=slots_B,
        counts_B=counts_B,
        starts_B=starts_B,
        committed_B=committed_B,
        column_N=column_N,
        slot_N=slots_B.index_select(0, column_N) * real_N,
        position_N=(committed_B.index_select(0, column_N) + offset_N) * real_N,
        real_N=real_N,
        buckets=tuple(_bucket(part, layout, slots_B, order_B, counts_B, starts_B, num_rows) for part in layout.parts),
        scatter_N=((base_B.index_select(0, column_N) + offset_N) * real_N).clamp_(max=layout.num_cells - 1),
    )


def _bucket(
    part: Part, layout: Layout, slots_B: Tensor, order_B: Tensor, counts_B: Tensor, starts_B: Tensor, num_rows: int
) -> Bucket:
    members_B = order_B[part.start : part.stop]
    if len(layout.parts) > 1:  # one bucket alone holds all columns, in their order
        slots_B, counts_B, starts_B = (x_B.index_select(0, members_B) for x_B in (slots_B, counts_B, starts_B))
    cell_W = torch.arange(part.width, device=counts_B.device)
    rows_BW = starts_B[:, None] + cell_W * (cell_W < counts_B[:, None])
    return Bucket(
        part=part,
        members_B=members_B,
        slots_B=slots_B,
        counts_B=counts_B,
        rows_BW=rows_BW.clamp_(max=num_rows - 1),
    )


def stage_layout(layout: Layout, slots: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """slots, order and base as int64 tensors, in one copy; for passes whose columns are not staged with a step's."""
    columns = torch.tensor([list(slots), layout.order, layout.base], dtype=torch.int64).to(device)
    return columns[0], columns[1], columns[2]
