"""Sampling and stopping parameters by slot, on the device, with host flags that say which code a batch needs at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.demands import NO_SHAPING
from workers.plan import NewSequence, temperature_class
from workers.sampling.processors import RowParams
from workers.sampling.randomness import signed_seed
from workers.sampling.verify import NO_TOKEN, TypicalParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """What the sequences of a batch need; computed on the host so that unused work is not launched, and the same on all
    ranks.

    any_typical: typical-p in the law. any_lossy: typical verification.
    any_whole: rows of logits with all their columns, the target's and the drafter's, for something other than drawing.
    any_logprobs: the target's, to tell of emitted tokens.
    """

    any_sampled: bool
    any_sorted: bool
    any_typical: bool
    any_standard: bool
    any_coupled: bool
    any_lossy: bool
    any_whole: bool
    any_logprobs: bool

    @property
    def draws_drafts(self) -> bool:
        """Whether any drafts are drawn with noise of their own."""
        return self.any_standard or self.any_lossy


class SamplingRegisters:
    """One row per slot (row 0: the null slot). `max_stop_ids` is the width of the stop table.

    seed: int64, the bits of the uint64 seed. coupled, lossy: verification of sampled requests, at most one of them.
    epsilon, delta: float32, of lossy ones. uid orders ties in admission.
    temperature_class: int64, in which the scores of its drafts are calibrated.
    num_logprobs, num_prompt_logprobs: on the host, as in `NewSequence`.
    """

    def __init__(self, num_slots: int, max_stop_ids: int, device: torch.device) -> None:
        rows = num_slots + 1
        self.temperature = torch.zeros(rows, device=device)
        self.temperature_class = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self.typical_p = torch.ones(rows, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.coupled = torch.zeros(rows, dtype=torch.bool, device=device)
        self.lossy = torch.zeros(rows, dtype=torch.bool, device=device)
        self.epsilon = torch.zeros(rows, device=device)
        self.delta = torch.zeros(rows, device=device)
        self.uid = torch.zeros(rows, dtype=torch.int64, device=device)
        self.max_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.stop_ids = torch.full((rows, max_stop_ids), NO_TOKEN, dtype=torch.int64, device=device)
        self.num_logprobs: list[int | None] = [None] * rows
        self.num_prompt_logprobs: list[int | None] = [None] * rows
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
        put(self.typical_p, [s.typical_p for s in sequences])
        put(self.seed, [signed_seed(s.seed) for s in sequences])
        put(self.coupled, [s.coupled and s.typical is None for s in sequences])
        put(self.lossy, [_is_lossy(s) for s in sequences])
        put(self.epsilon, [0.0 if s.typical is None else s.typical.epsilon for s in sequences])
        put(self.delta, [0.0 if s.typical is None else s.typical.delta for s in sequences])
        put(self.uid, [s.uid for s in sequences])
        put(self.max_tokens, [s.max_tokens for s in sequences])
        put(self.stop_ids, [[*s.stop_token_ids, *[NO_TOKEN] * (width - len(s.stop_token_ids))] for s in sequences])
        for s in sequences:
            self.num_logprobs[s.slot] = s.num_logprobs
            self.num_prompt_logprobs[s.slot] = s.num_prompt_logprobs
            self._modes[s.slot] = _modes_of(s)

    def modes(self, slots: Sequence[int]) -> Modes:
        chosen = [self._modes[slot] for slot in slots]
        return Modes(
            any_sampled=any(m.any_sampled for m in chosen),
            any_sorted=any(m.any_sorted for m in chosen),
            any_typical=any(m.any_typical for m in chosen),
            any_standard=any(m.any_standard for m in chosen),
            any_coupled=any(m.any_coupled for m in chosen),
            any_lossy=any(m.any_lossy for m in chosen),
            any_whole=any(m.any_whole for m in chosen),
            any_logprobs=any(m.any_logprobs for m in chosen),
        )

    def typical_params(self, slots_B: Tensor) -> TypicalParams:
        """Of the typical verification of each sequence."""
        return TypicalParams(
            lossy_B=self.lossy.index_select(0, slots_B),
            epsilon_B=self.epsilon.index_select(0, slots_B),
            delta_B=self.delta.index_select(0, slots_B),
        )

    def row_params(self, slots_R: Tensor) -> RowParams:
        """Parameters of each row's sequence."""
        return RowParams(
            temperature=self.temperature.index_select(0, slots_R),
            top_k=self.top_k.index_select(0, slots_R),
            top_p=self.top_p.index_select(0, slots_R),
            min_p=self.min_p.index_select(0, slots_R),
            typical_p=self.typical_p.index_select(0, slots_R),
        )


_NOTHING = Modes(
    any_sampled=False,
    any_sorted=False,
    any_typical=False,
    any_standard=False,
    any_coupled=False,
    any_lossy=False,
    any_whole=False,
    any_logprobs=False,
)


def _is_lossy(sequence: NewSequence) -> bool:
    """A greedy law is a point mass, of which typical verification would make the exact stream too."""
    return sequence.typical is not None and sequence.temperature != 0


def _modes_of(sequence: NewSequence) -> Modes:
    sampled, lossy = sequence.temperature != 0, _is_lossy(sequence)
    return Modes(
        any_sampled=sampled,
        any_sorted=sampled and (sequence.top_k > 0 or sequence.top_p < 1),
        any_typical=sampled and sequence.typical_p < 1,
        any_standard=sampled and not lossy and not sequence.coupled,
        any_coupled=sampled and not lossy and sequence.coupled,
        any_lossy=lossy,
        any_whole=sequence.shaping != NO_SHAPING or sequence.constraint is not None,
        any_logprobs=sequence.num_logprobs is not None,
    )
