"""The fast numerics: padded buckets, library kernels, whole matrix products. A row's bits may depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.collectives import Group
from parallel.experts import ABSENT
from state.fold import DeltaInputs, gated_delta_chunks
from workers.batch import Batch
from workers.ops.base import Experts, KVReader, SharedExpert

# The public name came after torch 2.9.
_library_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
_GROUPED_ROW_BYTES = 16
"""The library's grouped product takes rows of a multiple of this only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketedView:
    """read_BL: per bucket, KV row of every position, the null row where there is nothing to read.
    mask_B1WL: 0 where a cell may look, −inf elsewhere; float of the activations' dtype.
    shared_masks: the masks repeated for query heads that share a key/value head, made by the first layer that asks."""

    batch: Batch
    write_N: Tensor
    read_BL: tuple[Tensor, ...]
    mask_B1WL: tuple[Tensor, ...]
    shared_masks: dict[int, list[Tensor]] = field(default_factory=dict)

    def attend(self, q_NQD: Tensor, kv: Tensor) -> Tensor:
        """See workers.ops.base.AttentionView."""
        parts = []
        num_kv, head_dim = kv.shape[2], kv.shape[3]
        share = q_NQD.shape[1] // num_kv
        if share not in self.shared_masks:
            self.shared_masks[share] = [mask.repeat(1, 1, share, 1) for mask in self.mask_B1WL]
        for bucket, read_BL, mask in zip(self.batch.buckets, self.read_BL, self.shared_masks[share], strict=True):
            size, width, length = bucket.size, bucket.width, read_BL.shape[1]
            # Query heads that share a key/value head become rows of one problem, so K and V are not repeated.
            q = bucket.gather(q_NQD).view(size, width, num_kv, share, head_dim).permute(0, 2, 3, 1, 4)
            q = q.reshape(size, num_kv, share * width, head_dim)
            rows = read_BL.view(-1)
            k, v = (part.index_select(0, rows).view(size, length, num_kv, head_dim).transpose(1, 2) for part in kv)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            out = out.view(size, num_kv, share, width, head_dim).permute(0, 3, 1, 2, 4)
            parts.append(out.reshape(size, width, share * num_kv, head_dim))
        return self.batch.scatter(parts)


class DefaultOps:
    """See workers.ops.base.Ops."""

    row_multiple = 1

    def __init__(self, dtype: torch.dtype, device: torch.device, tp: Group) -> None:
        self._tp = tp
        self._open, self._closed = torch.tensor([0.0, float("-inf")], dtype=dtype, device=device)

    def linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        return F.linear(x_ND, weight_OD)

    def row_linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        return self._tp.all_reduce(F.linear(x_ND, weight_OD))

    def attention_view(
        self, batch: Batch, pool: KVReader, group: str, gap: tuple[Tensor, Tensor] | None
    ) -> BucketedView:
        reads, masks = [], []
        end_B = batch.committed_B + batch.counts_B
        for bucket in batch.buckets:
            position_L = torch.arange(bucket.part.length, device=end_B.device)
            bucket_end_B = end_B if len(batch.buckets) == 1 else end_B.index_select(0, bucket.members_B)
            readable_BL = position_L < bucket_end_B[:, None]
            if gap is not None:
                start, end = (bound.index_select(0, bucket.slots_B)[:, None] for bound in gap)
                readable_BL &= (position_L < start) | (position_L >= end)
            reads.append(pool.kv_rows_of(group, bucket.slots_B, bucket.part.length) * readable_BL)
            visible_BWL = readable_BL[:, None] & (position_L <= bucket.gather(batch.position_N)[..., None])
            masks.append(torch.where(visible_BWL, self._open, self._closed)[:, None])
        return BucketedView(
            batch=batch,
            write_N=pool.kv_rows(group, batch.slot_N[: batch.num_real], batch.position_N[: batch.num_real]),
            read_BL=tuple(reads),
            mask_B1WL=tuple(masks),
        )

    def delta_outputs(
        self, state_BHKV: Tensor, q_BWJK: Tensor, inputs: DeltaInputs, counts_B: Tensor, *, advance: bool
    ) -> tuple[Tensor, Tensor]:
        # Outputs of rows that count never see later ones; only a state that goes on must not either.
        counted = inputs.only_first(counts_B) if advance else inputs
        out, state = gated_delta_chunks(state_BHKV, q_BWJK, counted, advance=advance)
        assert out is not None
        return out, state

    def delta_fold(self, state_BHKV: Tensor, records: DeltaInputs, counts_B: Tensor) -> Tensor:
        return gated_delta_chunks(state_BHKV, None, records.only_first(counts_B))[1]

    def dense(self, x: Tensor) -> Tensor:
        return x

    def mixture(
        self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor, experts: Experts, shared: SharedExpert
    ) -> Tensor:
        shared_ND = F.linear(shared.inner_NF, shared.down_DF)
        if experts.owners is None:
            # One reduction serves the partial sums of routed and shared experts.
            routed_ND = _experts(x_ND, expert_NK, weight_NK, experts)
            return self._tp.all_reduce(torch.addcmul(routed_ND, shared_ND, shared.gate_N1))
        # Ranks that hold the same rows send a part each; the reduction brings the parts together again.
        start, stop = row_part(x_ND.shape[0], self._tp)
        x_ND, expert_NK, weight_NK = x_ND[start:stop], expert_NK[start:stop], weight_NK[start:stop]
        sent, received = experts.owners.exchange(x_ND, expert_NK, weight_NK)
        y_MD = _experts(received.x_MD, received.expert_MK, received.weight_MK, experts)
        total_ND = shared_ND * shared.gate_N1
        total_ND[start:stop] += experts.owners.return_sums(y_MD, sent, received)
        return self._tp.all_reduce(total_ND)


def row_part(num_rows: int, group: Group) -> tuple[int, int]:
    """Which of the rows that a group shares one rank handles."""
    part = -(-num_rows // group.size)
    return min(group.rank * part, num_rows), min((group.rank + 1) * part, num_rows)


def _experts(x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor, experts: Experts) -> Tensor:
    """Weighted sum over the experts of each row that are present; partial where experts are cut."""
    num_rows, top_k = expert_NK.shape
    gate_up_EOD, down_EDF = experts.gate_up_EOD, experts.down_EDF
    if num_rows == 0:
        return torch.zeros_like(x_ND)
    if num_rows == 1 and x_ND.device.type == "cpu":
        return _experts_of_one_row(x_ND, expert_NK, weight_NK, experts)
    num_experts = gate_up_EOD.shape[0]
    flat = expert_NK.reshape(-1)
    if experts.owners is not None:
        flat = flat.masked_fill(flat == ABSENT, num_experts)  # behind all groups
    order = flat.argsort(stable=True)
    counts_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    ends_E = counts_E.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0)[:-1].to(torch.int32)
    gate, up = _grouped_mm(x_ND.index_select(0, order // top_k), gate_up_EOD, ends_E).chunk(2, -1)
    out = _grouped_mm(F.silu(gate) * up, down_EDF, ends_E)
    out = torch.empty_like(out).index_copy_(0, order, out).view(num_rows, top_k, -1)
    if experts.owners is not None:
        out = out.masked_fill(expert_NK[..., None] == ABSENT, 0)  # rows behind all groups hold anything
    return (out * weight_NK[..., None]).sum(1)


def _grouped_mm(x_PD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """x Wᵀ of each row with its group's matrix; group e is [ends[e − 1], ends[e]). Rows behind all groups: anything."""
    widths = (x_PD.shape[1], weight_EOD.shape[1])
    if not any(width * x_PD.element_size() % _GROUPED_ROW_BYTES for width in widths):
        return _library_grouped_mm(x_PD, weight_EOD.transpose(1, 2), offs=ends_E)
    out_PO = x_PD.new_zeros(x_PD.shape[0], weight_EOD.shape[1])
    start = 0
    for stop, weight_OD in zip(ends_E.tolist(), weight_EOD, strict=True):
        out_PO[start:stop] = F.linear(x_PD[start:stop], weight_OD)
        start = stop
    return out_PO


def _experts_of_one_row(x_1D: Tensor, expert_1K: Tensor, weight_1K: Tensor, experts: Experts) -> Tensor:
    """A single row on a CPU: the experts' own matrices, read in place, without sorting or grouping."""
    out_1D = torch.zeros_like(x_1D)
    for i, expert in enumerate(expert_1K[0].tolist()):
        if expert != ABSENT:
            gate, up = F.linear(x_1D, experts.gate_up_EOD[expert]).chunk(2, -1)
            out_1D.addcmul_(F.linear(F.silu(gate) * up, experts.down_EDF[expert]), weight_1K[:, i : i + 1])
    return out_1D
