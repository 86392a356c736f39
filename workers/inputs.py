"""Host columns of a plan on their way to the device: one buffer per tier, allocated once, one copy per step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.plan import StepPlan


class StepInputs:
    """Stages int64 columns. A tier is the next power of two above the number of sequences, so that a captured step
    finds its inputs at fixed addresses."""

    _COLUMNS = 4

    def __init__(self, max_sequences: int, device: torch.device) -> None:
        self._device = device
        self._pin = device.type == "cuda"
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._max_sequences = max_sequences

    def stage(self, plan: StepPlan) -> StepColumns:
        count = len(plan.slots)
        host, device = self._tier(count)
        columns: tuple[Sequence[int], ...] = (plan.slots, plan.num_known, plan.num_drafts, plan.samples)
        host[:, :count] = torch.tensor(columns, dtype=torch.int64)
        device.copy_(host, non_blocking=True)
        return StepColumns(*(device[i, :count] for i in range(self._COLUMNS)))

    def _tier(self, count: int) -> tuple[Tensor, Tensor]:
        if count > self._max_sequences:
            raise ValueError(f"{count} sequences in a step, {self._max_sequences} slots")
        tier = 1 << max(count - 1, 0).bit_length()
        if tier not in self._buffers:
            host = torch.zeros(self._COLUMNS, tier, dtype=torch.int64, pin_memory=self._pin)
            self._buffers[tier] = (host, torch.zeros_like(host, device=self._device))
        return self._buffers[tier]


class StepColumns:
    """int64 [B] on the device, views of the tier's buffer; valid until the next step is staged."""

    def __init__(self, slots_B: Tensor, num_known_B: Tensor, num_drafts_B: Tensor, samples_B: Tensor) -> None:
        self.slots_B = slots_B
        self.num_known_B = num_known_B
        self.num_drafts_B = num_drafts_B
        self.samples_B = samples_B
