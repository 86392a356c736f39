"""What a rank makes of logits and drafts, around a model that is a table: pools, registers, shaping and constraints as
they serve, no layers. Test material only."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from state.accounting import PoolSizes
from state.layout import StateLayout
from state.pools import DevicePools
from workers.constraints.compiler import Compiler
from workers.plan import MAX_STOP_IDS, NewSequence
from workers.sampling.processing import Processing
from workers.sampling.processors import target_law
from workers.sampling.registers import SamplingRegisters
from workers.sampling.shaper import Rows

Tokens = tuple[int, ...]
Logits = Callable[[Tokens], Sequence[float]]
CPU = torch.device("cpu")


def table(seed: int, vocab_size: int, *, memory: int = 2, spread: int = 8) -> Logits:
    """Logits of the next token by the last ones, drawn once each: multiples of 1/4."""

    def logits(tokens: Tokens) -> list[float]:
        rng = random.Random(f"{seed} {tokens[-memory:]}")
        return [rng.randint(-spread, spread) / 4 for _ in range(vocab_size)]

    return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """target, drafter: logits of the next token by all tokens before it, the prompt among them. fields: of the
    sequences. stops: ids that end one."""

    target: Logits
    drafter: Logits
    vocab_size: int
    prompt: Tokens = (0,)
    stops: Tokens = ()
    fields: dict[str, Any] = field(default_factory=dict)


class TinyRank:
    """Sequences of one world by slot, from 1 on.

    distort, claim: make it wrong: they change the rows of a window before it is processed, and what is told of the
    law that drafts are drawn from.
    """

    def __init__(self, world: World, compiler: Compiler, *, num_slots: int, max_length: int = 24) -> None:
        self.world = world
        layout = StateLayout(layers=(), hidden_size=1, vocab_size=world.vocab_size, activation_dtype="float32")
        sizes = PoolSizes(
            num_slots=num_slots,
            num_pages=(),
            page_size=1,
            max_rows=1,
            max_length=max_length,
            gamma_max=4,
            hidden_window=1,
        )
        self.pools = DevicePools(layout, sizes, CPU)
        self.registers = SamplingRegisters(num_slots, MAX_STOP_IDS, CPU)
        self.processing = Processing(self.pools, self.registers, compiler, world.vocab_size)
        self.outputs: list[list[int]] = [[] for _ in range(num_slots + 1)]
        self._sequences: dict[int, NewSequence] = {}
        self.distort: Callable[[Rows], Rows] = lambda rows: rows
        self.claim: Callable[[Tensor], Tensor] = lambda law: law

    def enter(self, slots: Sequence[int], **fields: Any) -> None:
        """New sequences; fields beside the world's."""
        prompt = self.world.prompt
        sequences = [new_sequence(slot, prompt, self.world.stops, **self.world.fields | fields) for slot in slots]
        self._sequences.update(zip(slots, sequences, strict=True))
        self.pools.enter(slots, [prompt] * len(slots), [()] * len(slots))
        self.registers.enter(sequences)
        self.processing.enter(sequences)
        for slot in slots:
            self.outputs[slot] = []

    def rewind(self, slots: Sequence[int], output: Tokens) -> None:
        """Sequences that have entered as if they had just committed this."""
        self.processing.matchers.enter([self._sequences[slot] for slot in slots])
        for slot in slots:
            self.outputs[slot] = []
            assert not output or self.commit(slot, output) == (len(output), False)

    def commit(self, slot: int, tokens: Sequence[int]) -> tuple[int, bool]:
        """How many of the tokens are kept, and whether they end the sequence by its constraint."""
        followed = self.processing.matchers.follow(slot, tokens)
        kept = list(tokens[: followed.count])
        self.write(slot, len(self.outputs[slot]), kept)
        self.outputs[slot] += kept
        return followed.count, bool(followed.end)

    def write(self, slot: int, position: int, tokens: Sequence[int]) -> None:
        """Tokens of the output into the log."""
        start = len(self.world.prompt) + position
        self.pools.token_log[slot, start : start + len(tokens)] = torch.tensor(list(tokens), dtype=torch.int32)

    def draft_laws(self, slots: Sequence[int], drafts: Sequence[Tokens]) -> Tensor:
        """The law of each one's next draft, [S, V], float32; it has as many drafts as the others."""
        step = len(drafts[0])
        for slot, before in zip(slots, drafts, strict=True):
            self.write(slot, len(self.outputs[slot]), before)
        index_S = self._next(slots) + step
        rows = Rows(
            slots=slots,
            slots_S=torch.tensor(slots),
            owners_R=torch.arange(len(slots)),
            index_R=index_S,
            first_S=index_S,
            width=1,
            longest=int(index_S.max()) + 1,
        )
        before_SJ = torch.tensor(drafts, dtype=torch.int64).view(len(slots), step)
        raw_RV = self._raw(self.world.drafter, slots, drafts)
        logits_RV = self.processing.of_drafts(raw_RV, rows, before_SJ)
        return self._law(logits_RV, torch.tensor(slots))

    def window_laws(self, slots: Sequence[int], drafts: Sequence[Tokens], num_pad: int = 0) -> Tensor:
        """The laws of each one's positions, [S, W, V]; cells behind its own drafts repeat its last one."""
        counts = [len(own) for own in drafts]
        width = 1 + max(counts)
        for slot, own in zip(slots, drafts, strict=True):
            self.write(slot, len(self.outputs[slot]), own)
        owners = [s for s, count in enumerate(counts) for _ in range(1 + count)]
        cells = [j for count in counts for j in range(1 + count)]
        first_S, owners_R = self._next(slots), torch.tensor([*owners, *[0] * num_pad])
        index_R = first_S[owners_R[: len(owners)]] + torch.tensor(cells)
        rows = Rows(
            slots=slots,
            slots_S=torch.tensor(slots),
            owners_R=owners_R,
            index_R=torch.cat([index_R, torch.zeros(num_pad, dtype=torch.int64)]),
            first_S=first_S,
            width=width,
            longest=int(index_R.max()) + 1,
        )
        before = [drafts[s][:j] for s, j in zip(owners, cells, strict=True)]
        raw_RV = self._raw(self.world.target, [slots[s] for s in owners], before)
        raw_RV = torch.cat([raw_RV, torch.zeros(num_pad, self.world.vocab_size)])
        drafts_SG = torch.tensor([[*own, *[0] * (width - 1 - len(own))] for own in drafts], dtype=torch.int64)
        logits_RV, _ = self.processing.of_window(
            raw_RV, self.distort(rows), drafts_SG.view(len(slots), width - 1), torch.tensor(counts)
        )
        law_RV = self._law(logits_RV, torch.tensor(slots)[owners_R])
        starts = [sum(1 + count for count in counts[:s]) for s in range(len(slots))]
        return torch.stack(
            [
                torch.stack([law_RV[start + min(j, count)] for j in range(width)])
                for start, count in zip(starts, counts, strict=True)
            ]
        )

    def _next(self, slots: Sequence[int]) -> Tensor:
        """Log index of each one's next token."""
        return torch.tensor([len(self.world.prompt) + len(self.outputs[slot]) for slot in slots])

    def _raw(self, model: Logits, slots: Sequence[int], drafts: Sequence[Tokens]) -> Tensor:
        prompt = self.world.prompt
        return torch.tensor(
            [model((*prompt, *self.outputs[slot], *own)) for slot, own in zip(slots, drafts, strict=True)]
        )

    def _law(self, logits_RV: Tensor, slots_R: Tensor) -> Tensor:
        modes = self.registers.modes(slots_R.tolist())
        return target_law(
            logits_RV,
            self.registers.row_params(slots_R),
            any_sampled=modes.any_sampled,
            any_sorted=modes.any_sorted,
            any_typical=modes.any_typical,
        )


def new_sequence(slot: int, prompt: Tokens, stops: Tokens, **fields: Any) -> NewSequence:
    return NewSequence(
        **{
            "slot": slot,
            "epoch": 1,
            "uid": slot,
            "prompt": prompt,
            "tables": (),
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "seed": slot,
            "coupled": False,
            "stop_token_ids": stops,
            "max_tokens": 100,
            **fields,
        }
    )
