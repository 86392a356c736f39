"""Sampling and stopping parameters by slot, on the device, with host flags that say which code a batch needs at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.plan import NewSequence, temperature_class
from workers.sampling.processors import RowParams
from workers.sampling.randomness import signed_seed
from workers.sampling.verify import NO_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """What the sequences of a batch need; computed on the host so that unused work is not launched."""

    any_sampled: bool
    any_sorted: bool
    any_standard: bool
    any_coupled: bool


class SamplingRegisters:
    """One row per slot (row 0: the null slot). `max_stop_ids` is the width of the stop table.

    seed: int64, the bits of the uint64 seed. coupled: verification of sampled requests. uid orders ties in admission.
    temperature_class: int64, in which the scores of its drafts are calibrated.
    """

    def __init__(self, num_slots: int, max_stop_ids: int, device: torch.device) -> None:
        rows = num_slots + 1
        self.temperature = torch.zeros(rows, device=device)
        self.temperature_class = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.coupled = torch.zeros(rows, dtype=torch.bool, device=device)
        self.uid = torch.zeros(rows, dtype=torch.int64, device=device)
        self.max_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.stop_ids = torch.full((rows, max_stop_ids), NO_TOKEN, dtype=torch.int64, device=device)
        self._modes = [_NOTHING] * rows

    def enter(self, sequences: Sequence[NewSequence]) -> None:
        """Writes the rows of sequences that take their slots."""
        if not sequences:
            return
        width = self.stop_ids.shape[1]
        device = self.temperature.device
        index = torch.tensor([s.slot for s in sequences], dtype=torch.int64).to(device)

        def put(register: Tensor, values: list[float] | list[int] | list[bool] | list[list[int]]) -> None:
            register.index_copy_(0, index, torch.tensor(values, dtype=register.dtype).to(device))

        put(self.temperature, [s.temperature for s in sequences])
        put(self.temperature_class, [temperature_class(s.temperature) for s in sequences])
        put(self.top_k, [s.top_k for s in sequences])
        put(self.top_p, [s.top_p for s in sequences])
        put(self.min_p, [s.min_p for s in sequences])
        put(self.seed, [signed_seed(s.seed) for s in sequences])
        put(self.coupled, [s.coupled for s in sequences])
        put(self.uid, [s.uid for s in sequences])
        put(self.max_tokens, [s.max_tokens for s in sequences])
        put(self.stop_ids, [[*s.stop_token_ids, *[NO_TOKEN] * (width - len(s.stop_token_ids))] for s in sequences])
        for s in sequences:
            sampled = s.temperature != 0
            self._modes[s.slot] = Modes(
                any_sampled=sampled,
                any_sorted=sampled and (s.top_k > 0 or s.top_p < 1),
                any_standard=sampled and not s.coupled,
                any_coupled=sampled and s.coupled,
            )

    def modes(self, slots: Sequence[int]) -> Modes:
        chosen = [self._modes[slot] for slot in slots]
        return Modes(
            any_sampled=any(m.any_sampled for m in chosen),
            any_sorted=any(m.any_sorted for m in chosen),
            any_standard=any(m.any_standard for m in chosen),
            any_coupled=any(m.any_coupled for m in chosen),
        )

    def row_params(self, slots_R: Tensor) -> RowParams:
        """Parameters of each row's sequence."""
        return RowParams(
            temperature=self.temperature.index_select(0, slots_R),
            top_k=self.top_k.index_select(0, slots_R),
            top_p=self.top_p.index_select(0, slots_R),
            min_p=self.min_p.index_select(0, slots_R),
        )


_NOTHING = Modes(any_sampled=False, any_sorted=False, any_standard=False, any_coupled=False)
