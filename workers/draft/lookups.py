"""Lookups of the sequences that asked for them, by slot, and their drafts as tensors. Owned by the rank that decides.

A looked-up draft is a point mass that the committed tokens fix: in standard verification its law is 1 at its token. Its
score is the log-odds of its chance and its confidence the chance itself, since the calibration is of the drafter's
scores.
Where no sequence of a step looks anything up, nothing is done.

Shapes: S sequences that draft, L of them with drafts looked up, G the most of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from state.pools import DevicePools
from workers.constraints.matchers import Matchers
from workers.draft.lookup import Guess, Lookup
from workers.draft.proposer import Proposal
from workers.plan import NewSequence, Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUp:
    """counts: drafts of each of L sequences, not rising. columns_L: which of the S sequences these are. tokens_LG:
    int64. scores_LG: float32 log-odds. laws: of the drafts that wait, [slots, γ_max, V]; None where none are kept.
    slots_L: rows of it."""

    counts: tuple[int, ...]
    columns_L: Tensor
    slots_L: Tensor
    tokens_LG: Tensor
    scores_LG: Tensor
    laws: Tensor | None

    def instead_of(
        self, step: int, drafts_S: Tensor, score_S: Tensor, confidence_S: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts number `step`, their scores and confidences, with those that were looked up in the place of the
        drafter's, and their laws written."""
        covered = sum(count > step for count in self.counts)
        if not covered:
            return drafts_S, score_S, confidence_S
        columns_L, tokens_L = self.columns_L[:covered], self.tokens_LG[:covered, step]
        found_L = self.scores_LG[:covered, step]
        if self.laws is not None:
            slots_L, law = self.slots_L[:covered], self.laws[:, step]
            law.index_fill_(0, slots_L, 0.0)
            law[slots_L, tokens_L] = 1.0
        return (
            drafts_S.index_copy(0, columns_L, tokens_L),
            score_S.index_copy(0, columns_L, found_L),
            confidence_S.index_copy(0, columns_L, torch.sigmoid(found_L)),
        )


class Lookups:
    """By slot. pools: for the token log. matchers: a draft that the constraint forbids ends what was looked up."""

    def __init__(self, pools: DevicePools, matchers: Matchers) -> None:
        self._pools, self._matchers = pools, matchers
        self._by_slot: dict[int, Lookup] = {}
        self._made: dict[int, tuple[Origin, int]] = {}

    def begin(self, sequences: Sequence[NewSequence]) -> None:
        """Sequences take their slots; whoever held them before has left."""
        self.leave([sequence.slot for sequence in sequences])
        for sequence in sequences:
            if sequence.prediction or sequence.looks_back:
                self._by_slot[sequence.slot] = Lookup(
                    sequence.prompt, sequence.prediction, looks_back=sequence.looks_back
                )

    def leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._by_slot.pop(slot, None)
            self._made.pop(slot, None)

    def looked_up(self, slots: Sequence[int]) -> tuple[tuple[Origin, int], ...]:
        """As `Proposer.looked_up`."""
        found = tuple(self._made.get(slot, (Origin.DRAFTER, 0)) for slot in slots)
        return found if any(count for _, count in found) else ()

    def look_up(self, proposal: Proposal, slots_S: Tensor, known_S: Tensor) -> LookedUp | None:
        """The drafts of those who have some; None where nobody has. known_S: log index of the newest token."""
        columns = [column for column, slot in enumerate(proposal.slots) if slot in self._by_slot]
        if not columns:
            return None
        self._learn(proposal.slots, columns, slots_S, known_S)
        guesses = []
        for column in columns:
            slot = proposal.slots[column]
            guess = self._allowed(slot, self._by_slot[slot].guess(proposal.gamma))
            self._made[slot] = (guess.origin, len(guess.tokens)) if guess.tokens else (Origin.DRAFTER, 0)
            if guess.tokens:
                guesses.append((column, guess))
        if not guesses:
            return None
        guesses.sort(key=lambda one: -len(one[1].tokens))
        columns_L = torch.tensor([column for column, _ in guesses]).to(slots_S.device)
        width = len(guesses[0][1].tokens)
        scores = [[math.log(chance) - math.log1p(-chance) for chance in guess.chances] for _, guess in guesses]
        return LookedUp(
            counts=tuple(len(guess.tokens) for _, guess in guesses),
            columns_L=columns_L,
            slots_L=slots_S.index_select(0, columns_L),
            tokens_LG=_table([guess.tokens for _, guess in guesses], width, torch.int64).to(slots_S.device),
            scores_LG=_table(scores, width, torch.float32).to(slots_S.device),
            laws=self._pools.draft_law if proposal.modes.any_standard else None,
        )

    def _learn(self, slots: Sequence[int], columns: Sequence[int], slots_S: Tensor, known_S: Tensor) -> None:
        """Takes in what was committed since the last look: a round's tokens in one read, more after a pause."""
        pools, lookups = self._pools, [self._by_slot[slots[column]] for column in columns]
        columns_L = torch.tensor(columns).to(slots_S.device)
        first_L = torch.tensor([len(lookup) for lookup in lookups]).to(slots_S.device)
        slots_L, known_L = slots_S.index_select(0, columns_L), known_S.index_select(0, columns_L)
        width = 1 + pools.sizes.gamma_max
        index_LW = torch.minimum(first_L[:, None] + torch.arange(width, device=slots_S.device), known_L[:, None])
        tokens_LW = pools.tokens_at(slots_L[:, None], index_LW)
        read = torch.cat([(known_L + 1)[:, None], tokens_LW], 1).tolist()
        for lookup, column, (end, *tokens) in zip(lookups, columns, read, strict=True):
            first = len(lookup)
            if end - first > width:
                tokens = pools.token_log[slots[column], first:end].tolist()
            lookup.extend(tokens[: end - first])

    def _allowed(self, slot: int, guess: Guess) -> Guess:
        """What of a guess the constraint of its sequence lets stand."""
        count = self._matchers.reach(slot, guess.tokens)
        return Guess(guess.origin, guess.tokens[:count], guess.chances[:count])


def _table(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)
