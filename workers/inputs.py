"""Host columns of a step on their way to the device: one buffer per tier, allocated once, one copy per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.batch import Layout
from workers.plan import BatchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """int64 on the device, views of the tier's buffer; valid until the next step is staged.

    slots_B, num_known_B, num_drafts_B, num_forced_B: of the plan. order_B, base_B: of the target pass's layout.
    sampling_S: columns that sample. chain_order_S, chain_base_S: of the layout of their draft chain.
    """

    slots_B: Tensor
    num_known_B: Tensor
    num_drafts_B: Tensor
    num_forced_B: Tensor
    order_B: Tensor
    base_B: Tensor
    sampling_S: Tensor
    chain_order_S: Tensor
    chain_base_S: Tensor


class StepInputs:
    """Stages columns. A tier is the next power of two above the number of sequences, so that a captured step finds its
    inputs at fixed addresses."""

    _NUM_COLUMNS = 9

    def __init__(self, max_sequences: int, device: torch.device) -> None:
        self._device = device
        self._pin = device.type == "cuda"
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._max_sequences = max_sequences

    def stage(self, plan: BatchPlan, layout: Layout, sampling: Sequence[int], chain: Layout) -> StepColumns:
        """Columns of one step. `sampling` and `chain` cover the sequences that sample, maybe none."""
        host, device = self._tier(len(plan.slots))
        columns = (
            plan.slots,
            plan.num_known,
            plan.num_drafts,
            plan.num_forced or (0,) * len(plan.slots),
            layout.order,
            layout.base,
            sampling,
            chain.order,
            chain.base,
        )
        width = host.shape[1]
        host.copy_(torch.tensor([[*column, *[0] * (width - len(column))] for column in columns], dtype=torch.int64))
        device.copy_(host, non_blocking=True)
        views = [device[i, : len(column)] for i, column in enumerate(columns)]
        return StepColumns(
            slots_B=views[0],
            num_known_B=views[1],
            num_drafts_B=views[2],
            num_forced_B=views[3],
            order_B=views[4],
            base_B=views[5],
            sampling_S=views[6],
            chain_order_S=views[7],
            chain_base_S=views[8],
        )

    def _tier(self, count: int) -> tuple[Tensor, Tensor]:
        if count > self._max_sequences:
            raise ValueError(f"{count} sequences in a step, {self._max_sequences} slots")
        tier = 1 << max(count - 1, 0).bit_length()
        if tier not in self._buffers:
            host = torch.zeros(self._NUM_COLUMNS, tier, dtype=torch.int64, pin_memory=self._pin)
            self._buffers[tier] = (host, torch.zeros_like(host, device=self._device))
        return self._buffers[tier]
