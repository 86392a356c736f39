"""Where each constrained sequence stands in its grammar: a function of what it has committed. Knows no tensor.

    masks     for a round's positions, along its drafts
    reach     how far drafts may stand that were not drawn under a mask
    follow    the committed tokens of a round, for good; says where nothing more may follow

Drafting, verification and plain decoding ask for the same masks, each with the tokens before a position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workers.constraints.compiler import Compiler, ConstraintError, Mask
from workers.constraints.path import Path
from workers.plan import NewSequence, RankEnd


@dataclass(frozen=True, slots=True)
class Followed:
    """count: tokens that are kept. problem: what went wrong, with RankEnd.BROKEN."""

    count: int
    end: RankEnd = RankEnd.NONE
    problem: str = ""


class Matchers:
    """Of the sequences of one rank that decides, by slot."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._by_slot: dict[int, Path] = {}
        self._problems: dict[int, str] = {}

    def enter(self, sequences: Sequence[NewSequence]) -> None:
        """Sequences take their slots; whoever held them before has left."""
        self.leave(sequence.slot for sequence in sequences)
        for sequence in sequences:
            if sequence.constraint is None:
                continue
            try:
                self._by_slot[sequence.slot] = Path(self._compiler, sequence.constraint)
            except ConstraintError as error:
                self._problems[sequence.slot] = str(error)

    def leave(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._by_slot.pop(slot, None)
            self._problems.pop(slot, None)

    def constrains(self, slots: Sequence[int]) -> bool:
        """Whether any of them has a constraint."""
        return any(slot in self._by_slot or slot in self._problems for slot in slots)

    def masks(self, slot: int, drafts: Sequence[int]) -> list[Mask | None]:
        """What may stand at the position of each draft, and behind them all; fewer where a draft may not stand, the
        last one being that of its position. None where it could not be told: everything may, and `follow` says so.
        Empty for a sequence without a constraint."""
        path = self._by_slot.get(slot)
        return [] if path is None else [place.mask for place in path.along(drafts)]

    def reach(self, slot: int, drafts: Sequence[int]) -> int:
        """How many drafts may stand, one behind the other."""
        path = self._by_slot.get(slot)
        return len(drafts) if path is None else len(path.along(drafts)) - 1

    def follow(self, slot: int, emitted: Sequence[int]) -> Followed:
        """Takes what was committed. Where the grammar is met and nothing may follow, tokens behind are cut off; where a
        mask could not be told, behind the token that was drawn without it."""
        if slot in self._problems:
            return Followed(1, RankEnd.BROKEN, self._problems[slot])
        path = self._by_slot.get(slot)
        if path is None:
            return Followed(len(emitted))
        places = path.along(emitted)
        for count, token in enumerate(emitted, start=1):
            if count == len(places):
                return Followed(count, RankEnd.BROKEN, places[-1].problem or f"token {token} was not to stand")
            if path.ends_with(token) or places[count].ends:
                return Followed(count, RankEnd.CONSTRAINT)
        path.commit(emitted)
        return Followed(len(emitted))
