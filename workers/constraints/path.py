"""Where one sequence stands in its grammar, and the places along its drafts. A function of tokens: whatever was walked
before, the places along some drafts are those of the committed tokens and these.

    committed ──── newest │ draft ──── draft ──── …
                          └ place 0    └ place 1      where the next token may be one of …

What was walked is kept: the places that a draft was drawn at are those that it is verified at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workers.constraints.compiler import Compiler, ConstraintError, Mask, mask_of, roll_back
from workers.constraints.grammar import DEAD_END, explain_break
from workers.demands import Constraint

REFUEL_EVERY = 32
"""A lexer gets new fuel with each mask; without any, it lasts for some hundred tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """mask: None where it could not be told, for the reason in `problem`. ends: the grammar is met and lets nothing
    follow but the end."""

    mask: Mask | None
    ends: bool = False
    problem: str = ""

    def allows(self, token: int) -> bool:
        return self.mask is not None and bool(self.mask[token >> 3] >> (token & 7) & 1)


class Path:
    """Raises ConstraintError for a constraint that does not compile."""

    def __init__(self, compiler: Compiler, constraint: Constraint) -> None:
        self._compiler, self._constraint = compiler, constraint
        self._matcher = compiler.matcher(constraint)
        self._ends = frozenset(compiler.eos_token_ids())
        self._end_mask = _mask_of(self._ends, compiler.vocab_size)
        self._end = Place(mask=self._end_mask, ends=True)
        self._committed: list[int] = []
        # Drafts that were walked, and the places before each and behind them all.
        self._ahead: list[int] = []
        self._places: list[Place] = []
        # Where the matcher is, behind the committed tokens.
        self._consumed: list[int] = []

    def along(self, drafts: Sequence[int]) -> list[Place]:
        """The places of each draft and behind them all; where a draft may not stand, its place is the last."""
        same = _num_common(self._ahead, drafts)
        if same < min(len(drafts), len(self._ahead)):
            del self._ahead[same:], self._places[same + 1 :]
        if not self._places:
            self._places.append(self._find())
        while len(self._ahead) < len(drafts) and self._places[-1].allows(drafts[len(self._ahead)]):
            self._ahead.append(drafts[len(self._ahead)])
            self._places.append(self._find())
        return self._places[: 1 + len(drafts)]

    def commit(self, tokens: Sequence[int]) -> None:
        """Goes on for good. The tokens may stand, and do not end the output."""
        places = self.along(tokens)
        assert len(places) == 1 + len(tokens)
        if self._consumed[: len(tokens)] != list(tokens):
            self._move()
        self._committed += tokens
        self._consumed = self._consumed[len(tokens) :]
        self._ahead, self._places = [], [places[-1]]

    def ends_with(self, token: int) -> bool:
        """Whether a token ends the output wherever it stands."""
        return token in self._ends

    def _find(self) -> Place:
        """The place behind all tokens ahead. What ends the output is never consumed: there is nothing behind it."""
        if self._ahead and (self._places[-1].ends or self.ends_with(self._ahead[-1])):
            return self._end
        place = self._look() if self._move() else None
        if place is None or place.problem:
            # Others that share the lexer may have broken it.
            place = self._look() if self._replace() else None
        return place or Place(mask=None, problem=explain_break(self._matcher.get_error()))

    def _look(self) -> Place:
        if self._matcher.is_stopped():
            return self._end
        mask = mask_of(self._matcher, self._compiler.vocab_size)
        if mask is None:
            return Place(mask=None, problem=explain_break(self._matcher.get_error()))
        # A grammar may name an end in its middle, and a tokenizer may take one for text; here it is the end.
        mask = mask if self._matcher.is_accepting() else mask & ~self._end_mask
        return Place(mask=mask) if mask.any() else Place(mask=None, problem=DEAD_END)

    def _move(self) -> bool:
        """Brings the matcher behind all tokens ahead. False where it broke."""
        if self._matcher.is_error():
            return False
        same = _num_common(self._consumed, self._ahead)
        behind = len(self._consumed) - same
        self._consumed = list(self._ahead)
        if behind and not roll_back(self._matcher, behind):
            return False
        return all(self._matcher.consume_token(token) for token in self._ahead[same:])

    def _replace(self) -> bool:
        """Another matcher, at the same place. False where it breaks as well."""
        try:
            self._matcher = self._compiler.matcher(self._constraint)
        except ConstraintError:
            return False
        self._consumed = list(self._ahead)
        for count, token in enumerate((*self._committed, *self._ahead)):
            if count % REFUEL_EVERY == 0:
                self._matcher.compute_bitmask()
            if not self._matcher.consume_token(token):
                return False
        return True


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two runs begin with alike."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _mask_of(tokens: frozenset[int], vocab_size: int) -> Mask:
    bits = np.zeros(vocab_size, np.uint8)
    bits[sorted(tokens)] = 1
    return np.packbits(bits, bitorder="little")
