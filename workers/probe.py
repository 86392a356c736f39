"""Feeds given token sequences through target and drafter in chosen chunks and returns what comes out at every position.

The self-test of reference numerics and the parity tests run on it; it goes through the same batches, pools and
transaction as a step does. Knows no plans and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import CacheSettings
from state.accounting import plan_memory
from state.pools import DevicePools
from state.txn import StepTransaction
from workers.batch import build_batch, lay_out, stage_layout
from workers.models.qwen3_next import Qwen3Next
from workers.ops.base import Ops
from workers.passes import drafter_pass, target_pass
from workers.rows import pad_rows

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Per position of one sequence of length T: hidden [T, D] and logits [T, V] of the target, hidden of the drafter
    [T − 1, D] (its entry p needs token p + 1); None without a drafter."""

    hidden: Tensor
    logits: Tensor
    drafter: Tensor | None


class Probe:
    """Pools for a few sequences, and passes over them. Sequence i owns slot i + 1 and pages of its own."""

    def __init__(self, model: Qwen3Next, ops: Ops, sequences: Sequence[Sequence[int]]) -> None:
        self.model, self.ops, self.sequences = model, ops, sequences
        longest = max(map(len, sequences))
        memory = plan_memory(
            model.state_layout,
            CacheSettings(memory_mib=1 << 20, page_size=PAGE_SIZE, max_running=len(sequences)),
            max_model_len=longest + 1,
            max_step_tokens=sum(map(len, sequences)),
            gamma_max=0,
            hidden_window=1,
            drafting=model.drafter is not None,
        )
        self.pools = DevicePools(model.state_layout, memory.sizes, model.device)
        pages = memory.pages_per_longest
        self.pools.enter(
            range(1, len(sequences) + 1),
            sequences,
            [[range(1 + i * pages, 1 + (i + 1) * pages)] * len(memory.cache_groups) for i in range(len(sequences))],
        )
        self.lengths = [0] * len(sequences)

    @torch.inference_mode()
    def feed(self, counts: dict[int, int]) -> dict[int, Trace]:
        """One pass: the next `counts[i]` tokens of each named sequence, committed whole."""
        members, widths = list(counts), list(counts.values())
        layout = lay_out(widths, [self.lengths[i] + width for i, width in counts.items()], exact=True)
        slots_B, order_B, base_B = stage_layout(layout, [i + 1 for i in members], self.pools.device)
        counts_B = torch.tensor(widths).to(self.pools.device)
        batch = build_batch(
            layout,
            slots_B=slots_B,
            order_B=order_B,
            base_B=base_B,
            counts_B=counts_B,
            committed_B=self.pools.committed_len.index_select(0, slots_B),
            num_real=sum(widths),
            row_multiple=self.ops.row_multiple,
        )
        txn = StepTransaction(self.pools, slots_B, batch.buckets, batch.num_rows, self.ops.delta_fold)
        hidden = target_pass(self.model, self.ops, self.pools, batch, txn)
        txn.commit(counts_B)
        logits = self.model.logits(pad_rows(hidden.for_logits, self.ops.row_multiple))
        drafter = None
        if self.model.drafter is not None:
            drafter = drafter_pass(self.model, self.ops, self.pools, batch, hidden.for_draft).for_draft
        traces = {}
        start = 0
        for i, width in counts.items():
            rows = slice(start, start + width)
            start += width
            self.lengths[i] += width
            known = min(width, len(self.sequences[i]) - 1 - (self.lengths[i] - width))
            traces[i] = Trace(
                hidden=hidden.for_logits[rows],
                logits=logits[rows],
                drafter=None if drafter is None else drafter[rows][:known],
            )
        return traces


def trace_sequences(
    model: Qwen3Next, ops: Ops, sequences: Sequence[Sequence[int]], chunk: Callable[[int], int]
) -> list[Trace]:
    """Every sequence from its first to its last token; `chunk(i)`: tokens of sequence i in the next pass."""
    probe = Probe(model, ops, sequences)
    parts: list[list[Trace]] = [[] for _ in sequences]
    while live := [i for i, sequence in enumerate(sequences) if probe.lengths[i] < len(sequence)]:
        counts = {i: min(chunk(i), len(sequences[i]) - probe.lengths[i]) for i in live}
        for i, trace in probe.feed(counts).items():
            parts[i].append(trace)
    return [_joined(part) for part in parts]


def _joined(parts: Sequence[Trace]) -> Trace:
    drafter = [part.drafter for part in parts if part.drafter is not None]
    return Trace(
        hidden=torch.cat([part.hidden for part in parts]),
        logits=torch.cat([part.logits for part in parts]),
        drafter=torch.cat(drafter) if drafter else None,
    )
