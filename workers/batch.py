"""The rows of one pass as index tensors, built once per pass from lengths on the device. Knows no layers, no weights.

Rows are flat [N]; sequences own contiguous runs of them. Mixers need [B, W] instead: buckets hold sequences of about
one width, so the number of torch calls grows with neither the sequences nor the rows. Bucket and row maps:

    flat rows      [ s0 s0 s0 | s1 | s2 s2 s2 s2 ... s2 | padding ]
    narrow bucket  B = {s0, s1}, W = 3      wide bucket  B = {s2}, W = 256
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NARROW = 16
"""Widest sequence of the narrow bucket; anything longer is a prefill chunk and goes to the wide one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Sequences processed at one padded width.

    members_B: their columns in the batch. slots_B: their slots. counts_B: their rows in this pass.
    rows_BW: flat row of each cell; cells beyond counts point at the sequence's first row. valid_BW: cells that count.
    dense: rows [first_row, first_row + B·W) in order, without gaps, so that a view replaces the gather.
    is_wide: prefill chunks only; every row of theirs is known and will be committed.
    """

    members_B: Tensor
    slots_B: Tensor
    counts_B: Tensor
    rows_BW: Tensor
    valid_BW: Tensor
    dense: bool
    first_row: int
    is_wide: bool

    @property
    def size(self) -> int:
        return self.rows_BW.shape[0]

    @property
    def width(self) -> int:
        return self.rows_BW.shape[1]

    def gather(self, x_N: Tensor) -> Tensor:
        """[N, ...] → [B, W, ...]; cells that do not count hold some valid row."""
        tail = x_N.shape[1:]
        if self.dense:
            return x_N[self.first_row : self.first_row + self.size * self.width].view(self.size, self.width, *tail)
        return x_N.index_select(0, self.rows_BW.view(-1)).view(self.size, self.width, *tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One pass.

    num_rows: flat rows, padding included. num_real: rows up to which something may be real (a host upper bound).
    slots_B, counts_B, starts_B, committed_B: per sequence, its slot, its rows in this pass, its first flat row and its
    committed length before the pass.
    column_N: sequence of each row; padding rows say 0. slot_N: 0, the null slot, for padding.
    position_N: absolute position; 0 for padding. real_N: whether the row is real.
    scatter_N: where each flat row lies in the concatenation of the buckets' cells.
    max_length: host upper bound of the positions, exclusive.
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
    max_length: int

    def scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Bucket results [B, W, ...] back to flat rows [N, ...]; padding rows hold anything finite."""
        if len(parts) == 1 and self.buckets[0].dense and parts[0].shape[0] * parts[0].shape[1] == self.num_rows:
            return parts[0].reshape(self.num_rows, *parts[0].shape[2:])
        cells = torch.cat([part.reshape(-1, *part.shape[2:]) for part in parts])
        return cells.index_select(0, self.scatter_N)


def build_batch(
    *,
    slots: Sequence[int],
    max_counts: Sequence[int],
    exact: bool,
    counts_B: Tensor,
    committed_B: Tensor,
    num_real: int,
    row_multiple: int,
    max_length: int,
) -> Batch:
    """Lays out one pass without reading anything back from the device.

    slots, max_counts: host values; max_counts bounds counts_B from above, and equals it where `exact`.
    counts_B, committed_B: int64 on the device, the truth.
    num_real: host upper bound of sum(counts_B). row_multiple: flat rows are padded to a multiple of it.
    """
    device = counts_B.device
    num_rows = -(-num_real // row_multiple) * row_multiple
    slots_B = torch.tensor(slots, dtype=torch.int64).to(device)
    ends_B = counts_B.cumsum(0)
    starts_B = ends_B - counts_B
    row_N = torch.arange(num_rows, device=device)
    column_N = torch.searchsorted(ends_B, row_N, right=True)
    real_N = column_N < len(slots)
    column_N = column_N.clamp(max=len(slots) - 1)
    offset_N = row_N - starts_B.index_select(0, column_N)
    slot_N = slots_B.index_select(0, column_N) * real_N
    position_N = (committed_B.index_select(0, column_N) + offset_N) * real_N

    buckets: list[Bucket] = []
    base = [0] * len(slots)
    stride = 0
    host_starts = [0]
    for count in max_counts:
        host_starts.append(host_starts[-1] + count)
    for is_wide in (False, True):
        members = [i for i, count in enumerate(max_counts) if (count > NARROW) == is_wide]
        if not members:
            continue
        width = max(max_counts[i] for i in members)
        for place, i in enumerate(members):
            base[i] = stride + place * width
        stride += len(members) * width
        dense = exact and all(max_counts[i] == width for i in members) and members[-1] - members[0] + 1 == len(members)
        members_B = torch.tensor(members, dtype=torch.int64).to(device)
        bucket_counts_B = counts_B.index_select(0, members_B)
        cell_W = torch.arange(width, device=device)
        valid_BW = cell_W < bucket_counts_B[:, None]
        buckets.append(
            Bucket(
                members_B=members_B,
                slots_B=slots_B.index_select(0, members_B),
                counts_B=bucket_counts_B,
                rows_BW=(starts_B.index_select(0, members_B)[:, None] + cell_W * valid_BW).clamp(max=num_rows - 1),
                valid_BW=valid_BW,
                dense=dense,
                first_row=host_starts[members[0]] if dense else 0,
                is_wide=is_wide,
            )
        )
    base_B = torch.tensor(base, dtype=torch.int64).to(device)
    return Batch(
        num_rows=num_rows,
        num_real=num_real,
        slots_B=slots_B,
        counts_B=counts_B,
        starts_B=starts_B,
        committed_B=committed_B,
        column_N=column_N,
        slot_N=slot_N,
        position_N=position_N,
        real_N=real_N,
        buckets=tuple(buckets),
        scatter_N=((base_B.index_select(0, column_N) + offset_N) * real_N).clamp(max=max(stride - 1, 0)),
        max_length=max_length,
    )
