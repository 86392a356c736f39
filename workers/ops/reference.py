"""Reference numerics: every row's bits are independent of the other rows, their number and their order. float32 only.

How: flat rows are padded to blocks of 32 and every matrix product is done block by block, so one kernel shape serves
all batches, and never with columns at the end that a library computes otherwise; attention goes one query row at a time
over blocks of positions with a running softmax; the recurrence goes token by token; experts are combined in router
order; row-parallel products are sums of K-slices added in rank order.
Element-wise work happens on padded flat rows, since vector bodies and tails round differently.
Proven on each machine at start by workers.selftest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.collectives import Group, solo
from parallel.experts import ABSENT
from state.fold import DeltaInputs, gated_delta_steps
from workers.batch import Batch
from workers.ops.base import Experts, KVReader, SharedExpert
from workers.rows import pad_rows

ROWS = 32
COLUMNS = 64
"""Products are padded to a multiple of this many columns: libraries compute the last few of another number otherwise
than the rest, and on another number of ranks other columns are the last."""

POSITIONS = 64
"""Positions per step of the running softmax, a power of two; blocks start at multiples of it whatever the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """read_NL: KV row of each position for each flat row; visible_NL: whether the row may look at it."""

    write_N: Tensor
    read_NL: Tensor
    visible_NL: Tensor

    def attend(self, q_NQD: Tensor, kv: Tensor) -> Tensor:
        """See workers.ops.base.AttentionView."""
        num_rows, num_heads, head_dim = q_NQD.shape
        num_kv = kv.shape[2]
        share = num_heads // num_kv
        q = (q_NQD * head_dim**-0.5).view(num_rows, 1, num_kv, share, head_dim)
        top = torch.full((num_rows, num_kv, share), float("-inf"), device=q.device)
        mass = torch.zeros_like(top)
        total = torch.zeros(num_rows, num_kv, share, head_dim, device=q.device)
        for block in range(0, self.read_NL.shape[1], POSITIONS):
            rows = self.read_NL[:, block : block + POSITIONS].reshape(-1)
            visible = self.visible_NL[:, block : block + POSITIONS, None, None]
            k, v = (part.index_select(0, rows).view(num_rows, POSITIONS, num_kv, 1, head_dim) for part in kv)
            scores = (q * k).sum(-1).masked_fill(~visible, float("-inf"))
            new_top = torch.maximum(top, scores.amax(1))
            # A row that has seen nothing yet keeps −inf as its maximum; 0 stands in, as −inf − (−inf) would be NaN.
            anchor = new_top.masked_fill(new_top == float("-inf"), 0)
            weights = (scores - anchor[:, None]).exp()
            scale = (top - anchor).exp()
            mass = mass * scale + _sum_positions(weights)
            total = total * scale[..., None] + _sum_positions(weights[..., None] * v)
            top = new_top
        return (total / mass[..., None]).view(num_rows, num_heads, head_dim)


class ReferenceOps:
    """See workers.ops.base.Ops. `k_slices`: parts of every row-parallel product, over all ranks together."""

    row_multiple = ROWS

    def __init__(self, k_slices: int, tp: Group) -> None:
        if k_slices % tp.size:
            raise ValueError(
                f"model.k_slices is {k_slices}; reference numerics on parallel.tp {tp.size} need a multiple of it, and "
                "compare equal only to runs with the same number"
            )
        self._k_slices = k_slices
        self._tp = tp

    def linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        assert x_ND.shape[0] % ROWS == 0
        width = weight_OD.shape[0]
        if width % COLUMNS:
            weight_OD = F.pad(weight_OD, (0, 0, 0, -width % COLUMNS))
        out = torch.empty(x_ND.shape[0], weight_OD.shape[0], dtype=x_ND.dtype, device=x_ND.device)
        transposed = weight_OD.t()
        for block in range(0, x_ND.shape[0], ROWS):
            torch.mm(x_ND[block : block + ROWS], transposed, out=out[block : block + ROWS])
        return out[:, :width].contiguous()

    def row_linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        return self._sum(self._slices(x_ND, weight_OD, self._tp.size), self._tp)

    def _slices(self, x_ND: Tensor, weight_OD: Tensor, num_ranks: int) -> Tensor:
        """The products of this rank's slices, [slices, N, O]; `num_ranks` ranks hold a part of D each."""
        width = x_ND.shape[1] * num_ranks
        slices = self._k_slices if width % self._k_slices == 0 else 1
        if slices % num_ranks:
            raise ValueError(
                f"model.k_slices is {self._k_slices}; reference numerics on parallel.tp {num_ranks} need a number that "
                f"divides the width {width} of every row-parallel product"
            )
        parts_x = x_ND.chunk(slices // num_ranks, 1)
        parts_w = weight_OD.chunk(slices // num_ranks, 1)
        return torch.stack([self.linear(x.contiguous(), w.contiguous()) for x, w in zip(parts_x, parts_w, strict=True)])

    @staticmethod
    def _sum(slices_JNO: Tensor, group: Group) -> Tensor:
        """All ranks' slices, gathered rather than reduced, added in their order."""
        slices = group.all_gather(slices_JNO).flatten(0, 1).unbind()
        total_NO = slices[0]
        for part_NO in slices[1:]:
            total_NO = total_NO + part_NO
        return total_NO

    def attention_view(self, batch: Batch, pool: KVReader, group: str, gap: tuple[Tensor, Tensor] | None) -> RowView:
        length = -(-batch.max_length // POSITIONS) * POSITIONS
        position_L = torch.arange(length, device=batch.slots_B.device)
        visible_NL = position_L <= batch.position_N[:, None]
        if gap is not None:
            start, end = (bound.index_select(0, batch.slot_N)[:, None] for bound in gap)
            visible_NL = visible_NL & ((position_L < start) | (position_L >= end))
        slot_NL = batch.slot_N[:, None].expand_as(visible_NL)
        return RowView(
            write_N=pool.kv_rows(group, batch.slot_N[: batch.num_real], batch.position_N[: batch.num_real]),
            read_NL=pool.kv_rows(group, slot_NL, position_L.expand_as(visible_NL) * visible_NL) * visible_NL,
            visible_NL=visible_NL,
        )

    def delta_outputs(
        self, state_BHKV: Tensor, q_BWJK: Tensor, inputs: DeltaInputs, counts_B: Tensor, *, advance: bool
    ) -> tuple[Tensor, Tensor]:
        out, state = gated_delta_steps(state_BHKV, q_BWJK, inputs, _decay(inputs), counts_B)
        assert out is not None
        return out, state

    def delta_fold(self, state_BHKV: Tensor, records: DeltaInputs, counts_B: Tensor) -> Tensor:
        return gated_delta_steps(state_BHKV, None, records, _decay(records), counts_B)[1]

    def dense(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def mixture(
        self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor, experts: Experts, shared: SharedExpert
    ) -> Tensor:
        num_rows, top_k = expert_NK.shape
        if experts.owners is None:
            slices_JPD = self._pairs(x_ND, expert_NK.reshape(-1), top_k, experts, self._tp.size)
            routed_ND = _weighted(self._sum(slices_JPD, self._tp).view(num_rows, top_k, -1), weight_NK)
        else:
            part = -(-num_rows // self._tp.size)
            mine = slice(self._tp.rank * part, (self._tp.rank + 1) * part)
            x_nD, expert_nK, weight_nK = x_ND[mine], expert_NK[mine], weight_NK[mine]
            sent, received = experts.owners.exchange(x_nD, expert_nK, weight_nK)
            expert_P = received.expert_MK.reshape(-1)
            slices_JPD = self._pairs(received.x_MD, expert_P, top_k, experts, 1)
            y_PD = self._sum(slices_JPD[:, expert_P != ABSENT], _ALONE)
            routed_nD = _weighted(experts.owners.return_pairs(y_PD, sent, received), weight_nK)
            padded_nD = pad_rows(routed_nD, part) if part else routed_nD
            routed_ND = self._tp.all_gather(padded_nD).flatten(0, 1)[:num_rows]
        shared_ND = self.row_linear(shared.inner_NF, shared.down_DF)
        return torch.addcmul(routed_ND, shared_ND, shared.gate_N1)

    def _pairs(self, x_ND: Tensor, expert_P: Tensor, top_k: int, experts: Experts, num_ranks: int) -> Tensor:
        """Slices of every (row, expert) pair's output, [slices, P, D]; those of absent experts mean nothing."""
        slices: Tensor | None = None
        for expert in range(experts.gate_up_EOD.shape[0]):
            chosen = (expert_P == expert).nonzero().view(-1)
            if chosen.numel() == 0:
                continue
            rows = F.pad(chosen, (0, -chosen.numel() % ROWS))
            gate, up = self.linear(x_ND.index_select(0, rows // top_k), experts.gate_up_EOD[expert]).chunk(2, -1)
            parts = self._slices(F.silu(gate.contiguous()) * up.contiguous(), experts.down_EDF[expert], num_ranks)
            if slices is None:
                slices = parts.new_zeros(parts.shape[0], expert_P.numel(), parts.shape[2])
            slices.index_copy_(1, chosen, parts[:, : chosen.numel()])
        if slices is None:
            return x_ND.new_zeros(max(1, self._k_slices // num_ranks), expert_P.numel(), x_ND.shape[1])
        return slices


_ALONE = solo()


def _sum_positions(x: Tensor) -> Tensor:
    """Σ over axis 1, of length POSITIONS, by halves. A library's sum over an outer axis takes an order that depends on
    how many heads lie beside it."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def _weighted(pairs_NKD: Tensor, weight_NK: Tensor) -> Tensor:
    """Σ over K in router order."""
    total_ND = pairs_NKD[:, 0] * weight_NK[:, 0, None]
    for i in range(1, weight_NK.shape[1]):
        total_ND = total_ND + pairs_NKD[:, i] * weight_NK[:, i, None]
    return total_ND


def _decay(inputs: DeltaInputs) -> Tensor:
    """exp on a copy padded to whole vectors, so that no element is computed by a vector loop's tail."""
    flat = inputs.log_decay.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % ROWS)).exp()[: flat.numel()].view(inputs.log_decay.shape)
