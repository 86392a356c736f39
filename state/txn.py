"""One pass over the state of many sequences as a transaction: begin, record, commit(n) or abort.

    begin      reads of committed state are allowed; KV rows at or beyond committed_len are scratch
    record     the pass writes KV scratch and the raw inputs of every recurrent layer, row by row
    commit(n)  folds the first n records of each sequence onto its committed state, rebuilds the convolution windows and
               advances committed_len by n; one-shot
    abort      drops the records; not a byte of committed state has changed

Between begin and commit no committed byte changes. n comes from a device tensor, one entry per sequence of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from state.fold import advance_conv_window
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


class DeltaFold(Protocol):
    """Advances recurrent states by the first counts records; the numerics in force decide the form."""

    def __call__(
        self, state_BHKV: Tensor, k_BWHK: Tensor, v_BWHV: Tensor, beta_BWH: Tensor, log_decay_BWH: Tensor, counts_B: Tensor
    ) -> Tensor: ...


class StepTransaction:
    """See the module. `slots_B` names the sequences of the batch; `num_rows` bounds the flat rows."""

    def __init__(self, pools: DevicePools, slots_B: Tensor, buckets: Sequence[BucketRows], num_rows: int, fold: DeltaFold) -> None:
        if num_rows > pools.sizes.max_rows:
            raise ValueError(f"a pass of {num_rows} rows does not fit the records of {pools.sizes.max_rows} rows")
        self._pools = pools
        self._slots_B = slots_B
        self._buckets = buckets
        self._num_rows = num_rows
        self._fold = fold
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
        """Raw inputs of the convolution, all rows of the pass."""
        pool, i = self._pools.conv_of[layer]
        pool.records[i, : self._num_rows].copy_(raw_NC)

    def record_delta(self, layer: int, k_NHK: Tensor, v_NHV: Tensor, beta_NH: Tensor, log_decay_NH: Tensor) -> None:
        """Raw inputs of the recurrence, all rows of the pass, float32."""
        pool, i = self._pools.delta_of[layer]
        for record, value in ((pool.k, k_NHK), (pool.v, v_NHV), (pool.beta, beta_NH), (pool.log_decay, log_decay_NH)):
            record[i, : self._num_rows].copy_(value)

    def record_advance(self, layer: int, bucket: int, state_BHKV: Tensor) -> None:
        """State after all rows of a wide bucket: a prefill chunk is committed whole, so its fold need not run twice."""
        self._advanced[layer, bucket] = state_BHKV

    def commit(self, counts_B: Tensor) -> None:
        """Advances every sequence of the batch by counts_B [B] int64 rows, 0 allowed (its state keeps every bit)."""
        self._close()
        for b, bucket in enumerate(self._buckets):
            bucket_counts_B = counts_B.index_select(0, bucket.members_B)
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

    def _commit_conv(self, bucket: BucketRows, counts_B: Tensor) -> None:
        size, width = bucket.rows_BW.shape
        for pool in self._pools.conv:
            layers = len(pool.layers)
            window = pool.committed.index_select(1, bucket.slots_B).flatten(0, 1)
            raw = pool.records.index_select(1, bucket.rows_BW.view(-1)).view(layers * size, width, -1)
            window = advance_conv_window(window, raw, counts_B.repeat(layers))
            pool.committed.index_copy_(1, bucket.slots_B, window.view(layers, size, *window.shape[1:]))

    def _commit_delta(self, pool: DeltaPool, b: int, bucket: BucketRows, counts_B: Tensor) -> None:
        size, width = bucket.rows_BW.shape
        layers = len(pool.layers)
        old = pool.committed.index_select(1, bucket.slots_B)
        if bucket.is_wide:
            new = torch.stack([self._advanced[layer, b] for layer in pool.layers])
            # A chunk that is not committed at all (counts 0) keeps its state.
            new = torch.where((counts_B > 0)[None, :, None, None, None], new, old)
        else:
            rows = bucket.rows_BW.view(-1)
            records = [
                record.index_select(1, rows).view(layers * size, width, *record.shape[2:])
                for record in (pool.k, pool.v, pool.beta, pool.log_decay)
            ]
            new = self._fold(old.flatten(0, 1), *records, counts_B.repeat(layers)).view_as(old)
        pool.committed.index_copy_(1, bucket.slots_B, new)
