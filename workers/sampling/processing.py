"""What requests make of logits, as one thing: shaping and constraints. Owned by the rank that decides.

    target rows     of_window   every position of a round, on its drafts
    drafter rows    of_drafts   one position of each chain, on the drafts before it

Both are the same functions of (logits, tokens before the position), so drafts are drawn from, verified by and decoded
under one law.

Shapes: S sequences, R rows, V vocabulary, G drafts that may have been admitted, J drafts drawn so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from state.pools import DevicePools
from workers.constraints.compiler import Compiler, Mask
from workers.constraints.matchers import Matchers
from workers.plan import NewSequence
from workers.sampling.registers import SamplingRegisters
from workers.sampling.shaper import Rows, Shaper


class Processing:
    """By slot."""

    def __init__(self, pools: DevicePools, registers: SamplingRegisters, compiler: Compiler, vocab_size: int) -> None:
        self.compiler = compiler
        self.matchers = Matchers(compiler)
        self._mask_bytes = -(-vocab_size // 8)
        self._shaper = Shaper(pools, registers, vocab_size)

    def enter(self, sequences: Sequence[NewSequence]) -> None:
        """Sequences take their slots; whoever held them before has left."""
        self._shaper.enter(sequences)
        self.matchers.enter(sequences)

    def leave(self, slots: Sequence[int]) -> None:
        """What the sequences of freed slots had, which may be much, is let go."""
        self._shaper.leave(slots)
        self.matchers.leave(slots)

    def of_window(
        self, logits_RV: Tensor, rows: Rows, drafts_SG: Tensor, num_drafts_S: Tensor
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Logits of a round's laws, and how many of each sequence's drafts are at or behind one that its constraint
        forbids; () where nothing is constrained.

        rows: those of each sequence follow each other, 1 + num_drafts of them; rows beyond count for nothing.
        """
        if not self.matchers.constrains(rows.slots):
            return self._shaper.shape(logits_RV, rows), ()
        masks: list[Mask | None] = []
        forbidden = []
        for slot, count, drafts in zip(rows.slots, num_drafts_S.tolist(), drafts_SG.tolist(), strict=True):
            found = self.matchers.masks(slot, drafts[:count])
            missing = 1 + count - len(found)
            forbidden.append(missing if found else 0)
            masks += [*found, *[None] * missing]
        return self._shaper.shape(logits_RV, rows, self._stack(masks, logits_RV)), tuple(forbidden)

    def of_drafts(self, logits_RV: Tensor, rows: Rows, before_SJ: Tensor) -> Tensor:
        """Logits of the next draft of each chain, a row each. before_SJ: the drafts that it has."""
        if not self.matchers.constrains(rows.slots):
            return self._shaper.shape(logits_RV, rows)
        masks: list[Mask | None] = []
        for slot, drafts in zip(rows.slots, before_SJ.tolist(), strict=True):
            found = self.matchers.masks(slot, drafts)
            masks.append(found[-1] if len(found) == 1 + len(drafts) else None)
        return self._shaper.shape(logits_RV, rows, self._stack(masks, logits_RV))

    def _stack(self, masks: Sequence[Mask | None], logits_RV: Tensor) -> Tensor | None:
        """What may stand, a bit each, beside each row of logits; None where everything may."""
        if all(mask is None for mask in masks):
            return None
        allowed = np.full((len(logits_RV), self._mask_bytes), 0xFF, np.uint8)
        for row, mask in enumerate(masks):
            if mask is not None:
                allowed[row] = mask
        return torch.from_numpy(allowed).to(logits_RV.device)
