"""Reference numerics: every row's bits are independent of the other rows, their number and their order. float32 only.

How: flat rows are padded to blocks of 32 and every matrix product is done block by block, so one kernel shape serves
all batches; attention goes one query row at a time over blocks of positions with a running softmax; the recurrence goes
token by token; experts are combined in router order; row-parallel products are sums of K-slices added in rank order.
Element-wise work happens on padded flat rows, since vector bodies and tails round differently.
Proven on each machine at start by workers.selftest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from state.fold import DeltaInputs, gated_delta_steps
from workers.batch import Batch
from workers.ops.base import KVReader

ROWS = 32
POSITIONS = 64
"""Positions per step of the running softmax; blocks start at multiples of it whatever the batch."""


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
            mass = mass * scale + weights.sum(1)
            total = total * scale[..., None] + (weights[..., None] * v).sum(1)
            top = new_top
        return (total / mass[..., None]).view(num_rows, num_heads, head_dim)


class ReferenceOps:
    """See workers.ops.base.Ops. `k_slices`: parts of every row-parallel product."""

    row_multiple = ROWS

    def __init__(self, k_slices: int) -> None:
        self._k_slices = k_slices

    def linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        assert x_ND.shape[0] % ROWS == 0
        out = torch.empty(x_ND.shape[0], weight_OD.shape[0], dtype=x_ND.dtype, device=x_ND.device)
        transposed = weight_OD.t()
        for block in range(0, x_ND.shape[0], ROWS):
            torch.mm(x_ND[block : block + ROWS], transposed, out=out[block : block + ROWS])
        return out

    def row_linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        width = x_ND.shape[1]
        slices = self._k_slices if width % self._k_slices == 0 else 1
        part = width // slices
        total = self.linear(x_ND[:, :part].contiguous(), weight_OD[:, :part].contiguous())
        for i in range(1, slices):
            total = total + self.linear(
                x_ND[:, i * part : (i + 1) * part].contiguous(), weight_OD[:, i * part : (i + 1) * part].contiguous()
            )
        return total

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

    def experts(
        self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor, gate_up_EOD: Tensor, down_EDF: Tensor
    ) -> Tensor:
        num_rows, top_k = expert_NK.shape
        flat = expert_NK.reshape(-1)
        out = torch.empty(num_rows * top_k, down_EDF.shape[1], dtype=x_ND.dtype, device=x_ND.device)
        for expert in range(gate_up_EOD.shape[0]):
            chosen = (flat == expert).nonzero().view(-1)
            if chosen.numel() == 0:
                continue
            padding = -chosen.numel() % ROWS
            rows = F.pad(chosen, (0, padding))
            gate, up = self.linear(x_ND.index_select(0, rows // top_k), gate_up_EOD[expert]).chunk(2, -1)
            result = self.row_linear(F.silu(gate.contiguous()) * up.contiguous(), down_EDF[expert])
            out.index_copy_(0, chosen, result[: chosen.numel()])
        parts = out.view(num_rows, top_k, -1)
        total = parts[:, 0] * weight_NK[:, 0, None]
        for i in range(1, top_k):
            total = total + parts[:, i] * weight_NK[:, i, None]
        return total


def _decay(inputs: DeltaInputs) -> Tensor:
    """exp on a copy padded to whole vectors, so that no element is computed by a vector loop's tail."""
    flat = inputs.log_decay.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % ROWS)).exp()[: flat.numel()].view(inputs.log_decay.shape)
