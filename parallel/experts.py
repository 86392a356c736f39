"""Which rank owns which expert, and the way of token rows to the owners and back. Knows no layer and no weights.

    exchange   each token row goes once to every rank that owns one of its experts, with their numbers and weights
    compute    the owners' business
    return     sums   one row back per row sent, added in rank order          (the fast numerics)
               pairs  one row back per (row, expert), for the sender to add   (reference numerics)

A rank without tokens takes part with zero rows. Between ranks every exchange is two collectives, counts and rows; the
way back is one, since both ends know its counts.

Shape letters: N rows here, K experts per row, D width, M rows received, P (row, expert) pairs, R ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel import slices
from parallel.collectives import Group, exchange_counts
from parallel.slices import Shard

ABSENT = -1
"""In place of an expert that another rank owns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Rows of all ranks for the experts of this one, by sender in rank order, each sender's in its own order.

    x_MD: the rows. expert_MK: local expert or ABSENT. weight_MK: the router's. counts: rows per sender.
    """

    x_MD: Tensor
    expert_MK: Tensor
    weight_MK: Tensor
    counts: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What the way back needs. to_RN: whether row n went to rank r. owner_NK: rank of each of a row's experts.
    counts: rows per destination."""

    to_RN: Tensor
    owner_NK: Tensor
    counts: list[int]


class ExpertOwners:
    """`num_experts` experts over the ranks of `group`, contiguous; the map allows any other placement.

    owner_E: rank of each expert. local_E: its number on that rank.
    dispatch_s, combine_s: time in the ways out and back; num_pairs: (row, expert) pairs that came, on the device. All
    since the last `clear`.
    """

    def __init__(self, num_experts: int, group: Group, device: torch.device) -> None:
        self._group = group
        self.dispatch_s = self.combine_s = 0.0
        self.num_pairs = torch.zeros((), dtype=torch.int64, device=device)
        owner: list[int] = []
        local: list[int] = []
        for rank in range(group.size):
            span = slices.experts(num_experts, Shard(rank, group.size))
            owner += [rank] * span.length
            local += range(span.length)
        self.owner_E = torch.tensor(owner, device=device)
        self.local_E = torch.tensor(local, device=device)

    def clear(self) -> None:
        self.dispatch_s = self.combine_s = 0.0
        self.num_pairs.zero_()

    def exchange(self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> tuple[Sent, Received]:
        """Sends rows out and takes those of others. The rows sent per destination are read on the host."""
        began = time.perf_counter()
        num_rows = expert_NK.shape[0]
        owner_NK = self.owner_E[expert_NK]
        to_RN = torch.zeros(self._group.size, num_rows, dtype=torch.bool, device=x_ND.device)
        to_RN.scatter_(0, owner_NK.t(), True)
        counts_R = to_RN.sum(1)
        row_S = to_RN.nonzero()[:, 1]
        # Expert numbers, weights and rows travel in one buffer of bytes.
        row_bytes = [
            expert_NK.to(torch.int32).view(torch.uint8),
            weight_NK.contiguous().view(torch.uint8),
            x_ND.contiguous().view(torch.uint8),
        ]
        packed_SB = torch.cat(row_bytes, 1).index_select(0, row_S)
        sent = Sent(to_RN=to_RN, owner_NK=owner_NK, counts=counts_R.tolist())
        counts = exchange_counts(self._group, counts_R)
        came_MB = self._group.all_to_all(packed_SB, sent.counts, counts)
        expert_MB, weight_MB, x_MB = torch.split(came_MB, [part.shape[1] for part in row_bytes], 1)
        expert_MK = _numbers(expert_MB, torch.int32).long()
        mine_MK = self.owner_E[expert_MK] == self._group.rank
        received = Received(
            x_MD=_numbers(x_MB, x_ND.dtype),
            expert_MK=torch.where(mine_MK, self.local_E[expert_MK], ABSENT),
            weight_MK=_numbers(weight_MB, weight_NK.dtype),
            counts=counts,
        )
        self.num_pairs += mine_MK.sum()
        self.dispatch_s += time.perf_counter() - began
        return sent, received

    def return_sums(self, y_MD: Tensor, sent: Sent, received: Received) -> Tensor:
        """One row per row received goes back; [N, D]: for each row the sum of what came, added in rank order."""
        began = time.perf_counter()
        back_SD = self._group.all_to_all(y_MD, received.counts, sent.counts)
        top_k = sent.owner_NK.shape[1]
        # Per row its entries of back, rank by rank, and the zero row where it went to fewer than K ranks.
        zero = back_SD.shape[0]
        entry_RN = (sent.to_RN.flatten().cumsum(0) - 1).view_as(sent.to_RN).masked_fill(~sent.to_RN, zero)
        entry_KN = entry_RN.sort(0).values[:top_k]
        back_SD = torch.cat([back_SD, back_SD.new_zeros(1, back_SD.shape[1])])
        total_ND = back_SD.index_select(0, entry_KN[0])
        for entry_N in entry_KN[1:]:
            total_ND = total_ND + back_SD.index_select(0, entry_N)
        self.combine_s += time.perf_counter() - began
        return total_ND

    def return_pairs(self, y_PD: Tensor, sent: Sent, received: Received) -> Tensor:
        """One row per present pair of the rows received goes back, row by row, in order of K; [N, K, D]."""
        began = time.perf_counter()
        num_rows, top_k = sent.owner_NK.shape
        owner_P = sent.owner_NK.flatten()
        back_counts = torch.zeros(self._group.size, dtype=torch.int64, device=y_PD.device)
        back_counts.scatter_add_(0, owner_P, torch.ones_like(owner_P))
        present_M = (received.expert_MK != ABSENT).sum(1)
        send_counts = [int(part.sum()) for part in torch.split(present_M, received.counts)]
        back_PD = self._group.all_to_all(y_PD.contiguous(), send_counts, back_counts.tolist())
        out_PD = torch.empty_like(back_PD).index_copy_(0, owner_P.argsort(stable=True), back_PD)
        self.combine_s += time.perf_counter() - began
        return out_PD.view(num_rows, top_k, y_PD.shape[1])


def _numbers(bytes_MB: Tensor, dtype: torch.dtype) -> Tensor:
    """Some columns of a buffer of bytes as what they stand for. Always a copy: a single row counts as contiguous
    wherever it lies, and would keep the buffer's stride."""
    return bytes_MB.clone(memory_format=torch.contiguous_format).view(dtype)
