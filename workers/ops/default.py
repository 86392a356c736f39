"""The fast numerics: padded buckets, library kernels, whole matrix products. A row's last bits may depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from state.fold import gated_delta_chunks
from workers.batch import Batch
from workers.ops.base import KVReader

DENSE_EXPERTS_MAX_ROWS = 8
"""Up to this many rows every expert is applied to every row: three calls beat sorting rows by expert."""
DENSE_EXPERTS_MAX = 16

# The public name came after torch 2.9.
_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketedView:
    """read_BL: per bucket, KV row of every position, the null row where there is nothing to read.
    mask_B1WL: 0 where a cell may look, −inf elsewhere; float of the activations' dtype."""

    write_N: Tensor
    read_BL: tuple[Tensor, ...]
    mask_B1WL: tuple[Tensor, ...]


class DefaultOps:
    """See workers.ops.base.Ops."""

    row_multiple = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        return F.linear(x_ND, weight_OD)

    def row_linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        return F.linear(x_ND, weight_OD)

    def attention_view(self, batch: Batch, pool: KVReader, group: str, gap_B: tuple[Tensor, Tensor] | None) -> BucketedView:
        reads, masks = [], []
        position_L = torch.arange(batch.max_length, device=batch.slots_B.device)
        for bucket in batch.buckets:
            length_B = (batch.committed_B + batch.counts_B).index_select(0, bucket.members_B)
            written_BL = position_L < length_B[:, None]
            slot_BL = bucket.slots_B[:, None].expand_as(written_BL)
            reads.append(pool.kv_rows(group, slot_BL, position_L.expand_as(written_BL) * written_BL) * written_BL)
            position_BW = bucket.gather(batch.position_N)
            visible_BWL = position_L <= position_BW[..., None]
            if gap_B is not None:
                start, end = (bound.index_select(0, bucket.slots_B)[:, None] for bound in gap_B)
                visible_BWL = visible_BWL & ((position_L < start) | (position_L >= end))[:, None]
            mask = torch.zeros(visible_BWL.shape, dtype=self._dtype, device=position_L.device)
            masks.append(mask.masked_fill(~visible_BWL, float("-inf"))[:, None])
        write_N = pool.kv_rows(group, batch.slot_N[: batch.num_real], batch.position_N[: batch.num_real])
        return BucketedView(write_N=write_N, read_BL=tuple(reads), mask_B1WL=tuple(masks))

    def attention(self, q_NQD: Tensor, kv: Tensor, batch: Batch, view: BucketedView) -> Tensor:
        parts = []
        num_kv, head_dim = kv.shape[2], kv.shape[3]
        share = q_NQD.shape[1] // num_kv
        for bucket, read_BL, mask_B1WL in zip(batch.buckets, view.read_BL, view.mask_B1WL, strict=True):
            size, width, length = bucket.size, bucket.width, read_BL.shape[1]
            # Query heads that share a key/value head become rows of one problem, so K and V are not repeated.
            q = bucket.gather(q_NQD).view(size, width, num_kv, share, head_dim).permute(0, 2, 3, 1, 4)
            q = q.reshape(size, num_kv, share * width, head_dim)
            k, v = (part.index_select(0, read_BL.view(-1)).view(size, length, num_kv, head_dim).transpose(1, 2) for part in kv)
            mask = mask_B1WL if share == 1 else mask_B1WL.repeat(1, 1, share, 1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            parts.append(out.view(size, num_kv, share, width, head_dim).permute(0, 3, 1, 2, 4).reshape(size, width, -1, head_dim))
        return batch.scatter(parts)

    def delta_outputs(
        self, state_BHKV: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, counts_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        beta, log_decay = _only_counted(beta, log_decay, counts_B)
        share = v.shape[2] // k.shape[2]
        out, state = gated_delta_chunks(state_BHKV, _repeat_heads(q, share), _repeat_heads(k, share), v, beta, log_decay)
        assert out is not None
        return out, state

    def delta_fold(self, state_BHKV: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, counts_B: Tensor) -> Tensor:
        beta, log_decay = _only_counted(beta, log_decay, counts_B)
        return gated_delta_chunks(state_BHKV, None, _repeat_heads(k, v.shape[2] // k.shape[2]), v, beta, log_decay)[1]

    def experts(self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor, gate_up_EOD: Tensor, down_EDF: Tensor) -> Tensor:
        num_rows, top_k = expert_NK.shape
        num_experts = gate_up_EOD.shape[0]
        if num_rows <= DENSE_EXPERTS_MAX_ROWS and num_experts <= DENSE_EXPERTS_MAX:
            gate, up = torch.bmm(x_ND.expand(num_experts, -1, -1), gate_up_EOD.transpose(1, 2)).chunk(2, -1)
            share_NE = torch.zeros(num_rows, num_experts, dtype=x_ND.dtype, device=x_ND.device).scatter_(1, expert_NK, weight_NK)
            return torch.bmm(F.silu(gate) * up * share_NE.t()[..., None], down_EDF.transpose(1, 2)).sum(0)
        flat = expert_NK.reshape(-1)
        order = flat.argsort(stable=True)
        ends_E = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0)
        offsets = ends_E.to(torch.int32)
        gate, up = _grouped_mm(x_ND.index_select(0, order // top_k), gate_up_EOD.transpose(1, 2), offs=offsets).chunk(2, -1)
        out = _grouped_mm(F.silu(gate) * up, down_EDF.transpose(1, 2), offs=offsets)
        out = torch.empty_like(out).index_copy_(0, order, out).view(num_rows, top_k, -1)
        return (out * weight_NK[..., None]).sum(1)


def _only_counted(beta: Tensor, log_decay: Tensor, counts_B: Tensor) -> tuple[Tensor, Tensor]:
    """Turns cells at or beyond counts into steps that change nothing."""
    counted = (torch.arange(beta.shape[1], device=beta.device) < counts_B[:, None])[..., None]
    return beta * counted, log_decay * counted


def _repeat_heads(x_BWHK: Tensor, share: int) -> Tensor:
    return x_BWHK if share == 1 else x_BWHK.repeat_interleave(share, 2)
