"""One pass over the state of many sequences as a transaction: begin, record, commit(n) or abort.

    begin      reads of committed state are allowed; KV rows at or beyond committed_len are scratch
    record     the pass writes KV scratch and the raw inputs of every recurrent layer, row by row
    commit(n)  folds the first n records of each sequence onto its committed state, rebuilds the convolution windows and
               advances committed_len by n; one-shot
    abort      drops the records; not a byte of committed state has changed

Between begin and commit no committed byte changes. n comes from a device tensor, one entry per sequence of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from state.fold import DeltaInputs, advance_conv_window
from state.pools import DeltaPool, DevicePools


class BucketRows(Protocol):
    """Sequences processed at one padded width; workers.batch.Bucket is one."""

    @property
    def slots_B(self) -> Tensor: ...
    @property
    def members_B(self) -> Tensor: ...
    @property
    def rows_BW(self) -> Tensor: ...
    @property
    def is_wide(self) -> bool: ...
    @property
    def dense(self) -> bool: ...
    @property
    def first_row(self) -> int: ...


DeltaFold = Callable[[Tensor, DeltaInputs, Tensor], Tensor]
"""(state_BHKV, records, counts_B) → state after the first counts records; the numerics in force decide the form."""


class StepTransaction:
    """See the module. `slots_B` names the sequences of the batch; `num_rows` bounds the flat rows."""

    def __init__(
        self, pools: DevicePools, slots_B: Tensor, buckets: Sequence[BucketRows], num_rows: int, fold: DeltaFold
    ) -> None:
        if num_rows > pools.sizes.max_rows:
            raise ValueError(f"a pass of {num_rows} rows does not fit the records of {pools.sizes.max_rows} rows")
        self._pools = pools
        self._slots_B = slots_B
        self._buckets = buckets
        self._num_rows = num_rows
        self._fold = fold
        self._conv: dict[int, Tensor] = {}
        self._delta: dict[int, DeltaInputs] = {}
        self._advanced: dict[tuple[int, int], Tensor] = {}
        self._open = True

    def conv_window(self, layer: int, bucket: int) -> Tensor:
        """Committed window [B, T − 1, C] of a layer for the sequences of a bucket."""
        pool, i = self._pools.conv_of[layer]
        return pool.committed[i].index_select(0, self._buckets[bucket].slots_B)

    def recurrent(self, layer: int, bucket: int) -> Tensor:
        """Committed matrices [B, H, K, V] of a layer for the sequences of a bucket; a copy."""
        pool, i = self._pools.delta_of[layer]
        return pool.committed[i].index_select(0, self._buckets[bucket].slots_B)

    def record_conv(self, layer: int, raw_NC: Tensor) -> None:
        """Raw inputs of the convolution, all rows of the pass; kept until commit, not to be written again."""
        self._conv[layer] = raw_NC

    def record_delta(self, layer: int, records: DeltaInputs) -> None:
        """Raw inputs of the recurrence, [N, ...], all rows of the pass; kept as `record_conv` keeps its own."""
        self._delta[layer] = records

    def record_advance(self, layer: int, bucket: int, state_BHKV: Tensor) -> None:
        """State after all rows of a wide bucket: a prefill chunk is committed whole, so its fold need not run twice."""
        self._advanced[layer, bucket] = state_BHKV

    def commit(self, counts_B: Tensor) -> None:
        """Advances every sequence of the batch by counts_B [B] int64 rows, 0 allowed (its state keeps every bit)."""
        self._close()
        self._gather_records()
        for b, bucket in enumerate(self._buckets):
            bucket_counts_B = counts_B if len(self._buckets) == 1 else counts_B.index_select(0, bucket.members_B)
            self._commit_conv(bucket, bucket_counts_B)
            for pool in self._pools.delta:
                self._commit_delta(pool, b, bucket, bucket_counts_B)
        self._pools.committed_len.index_add_(0, self._slots_B, counts_B)

    def abort(self) -> None:
        """Forgets the pass."""
        self._close()

    def _close(self) -> None:
        if not self._open:
            raise RuntimeError("a transaction commits or aborts once")
        self._open = False

    def _gather_records(self) -> None:
        """Records of layers with one spec side by side, so that one fold serves them all."""
        rows = self._num_rows
        for conv in self._pools.conv:
            torch.stack([self._conv[layer] for layer in conv.layers], out=conv.records[:, :rows])
        for delta in self._pools.delta:
            records = [self._delta[layer] for layer in delta.layers]
            torch.stack([r.k for r in records], out=delta.k[:, :rows])
            torch.stack([r.v for r in records], out=delta.v[:, :rows])
            torch.stack([r.beta for r in records], out=delta.beta[:, :rows])
            torch.stack([r.log_decay for r in records], out=delta.log_decay[:, :rows])

    def _commit_conv(self, bucket: BucketRows, counts_B: Tensor) -> None:
        size = bucket.rows_BW.shape[0]
        for pool in self._pools.conv:
            layers = len(pool.layers)
            window = pool.committed.index_select(1, bucket.slots_B).flatten(0, 1)
            window = advance_conv_window(window, _cells(pool.records, bucket), counts_B.repeat(layers))
            pool.committed.index_copy_(1, bucket.slots_B, window.view(layers, size, *window.shape[1:]))

    def _commit_delta(self, pool: DeltaPool, b: int, bucket: BucketRows, counts_B: Tensor) -> None:
        layers = len(pool.layers)
        old = pool.committed.index_select(1, bucket.slots_B)
        if bucket.is_wide:
            new = torch.stack([self._advanced[layer, b] for layer in pool.layers])
            # A chunk that is not committed at all (counts 0) keeps its state.
            new = torch.where((counts_B > 0)[None, :, None, None, None], new, old)
        else:
            records = DeltaInputs(
                k=_cells(pool.k, bucket),
                v=_cells(pool.v, bucket),
                beta=_cells(pool.beta, bucket),
                log_decay=_cells(pool.log_decay, bucket),
            )
            new = self._fold(old.flatten(0, 1), records, counts_B.repeat(layers)).view_as(old)
        pool.committed.index_copy_(1, bucket.slots_B, new)


def _cells(records_YN: Tensor, bucket: BucketRows) -> Tensor:
    """Records of Y layers [Y, rows, ...] as the cells of a bucket, [Y · B, W, ...]."""
    size, width = bucket.rows_BW.shape
    if bucket.dense:
        cells = records_YN[:, bucket.first_row : bucket.first_row + size * width]
    else:
        cells = records_YN.index_select(1, bucket.rows_BW.view(-1))
    return cells.reshape(records_YN.shape[0] * size, width, *records_YN.shape[2:])
