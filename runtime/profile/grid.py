"""Which steps a profile measures: loads, contexts, drafts and budgets that a deployment can run. Pure arithmetic.

One sweep holds the load and the context and goes through visits, each with so many drafts waiting; a visit is one step
that draws them and then a step per budget, which draws as many again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from state.pages import num_reserved_tokens
from workers.plan import WorkerDescription

SHORT_CONTEXT = 64
"""Tokens; where everything is measured."""
LONGER_SHARES = (0.125, 0.5)
"""Longer contexts, of what a sequence can have at most; at them only what tells how cost grows with the context."""
LONGER_LIMIT = 32768
"""Tokens; a context beyond is left to the slope."""
LONGER_ROWS = 16384
"""Prompt tokens of all sequences of a sweep at a longer context: reading them takes time too. One sequence may have
more."""
GROWTH = 128
"""Tokens that sequences may emit before they are begun anew, where there is room: a context that keeps moving is none.
"""


@dataclass(frozen=True, slots=True)
class Steps:
    """waiting: numbers of drafts, γ_max besides. shares: of all waiting drafts, verified."""

    waiting: tuple[int, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """sampled, greedy: what is measured of sequences that draw and of those that take the best, which is what the
    others do and less. warmup, repeats: rounds over all cells of a sweep. num_longer: contexts beyond the short one.
    load_ratio: of one load to the next."""

    sampled: Steps
    greedy: Steps
    warmup: int
    repeats: int
    num_longer: int
    load_ratio: int


THOROUGH = Pace(
    sampled=Steps((0, 1, 2, 3, 5), (0, 1 / 2, 1)),
    greedy=Steps((0, 1, 2, 3, 5), (0, 1)),
    warmup=1,
    repeats=5,
    num_longer=2,
    load_ratio=2,
)
QUICK = Pace(
    sampled=Steps((0, 1, 3), (0, 1 / 2, 1)),
    greedy=Steps((0, 1), (0, 1)),
    warmup=1,
    repeats=5,
    num_longer=1,
    load_ratio=4,
)
_ENDS = Steps((0,), (1,))
"""What tells how cost grows with the context."""


@dataclass(frozen=True, slots=True)
class Visit:
    """waiting: drafts per sequence. budgets: draft rows of a data-parallel rank, rising."""

    waiting: int
    budgets: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        """That with which the drafts come, among them."""
        return 1 + len(self.budgets)


@dataclass(frozen=True, slots=True)
class Sweep:
    """sampled: whether tokens are drawn. num_sequences: of a data-parallel rank. context: of their prompts. max_tokens:
    that each may emit."""

    sampled: bool
    num_sequences: int
    context: int
    max_tokens: int
    visits: tuple[Visit, ...]

    @property
    def num_steps(self) -> int:
        """Of one round over all cells."""
        return sum(visit.num_steps for visit in self.visits)


def sweeps(description: WorkerDescription, *, max_step_tokens: int, pace: Pace) -> Iterator[Sweep]:
    """All that is measured, short contexts first. Raises ValueError where not even one sequence fits."""
    room = _Room(description, max_step_tokens)
    short = min(SHORT_CONTEXT, max(1, room.longest // 2))
    most = room.most_sequences(short)
    if most < 1:
        raise ValueError(
            f"not even one sequence of {short} tokens fits beside the drafts that a profile needs; raise "
            "cache.memory_mib or cache.max_model_len, or lower speculation.gamma_max"
        )
    loads = _loads(most, pace.load_ratio)
    for load in loads:
        yield room.sweep(load, short, pace.sampled, sampled=True)
        yield room.sweep(load, short, pace.greedy, sampled=False)
    for share in LONGER_SHARES[len(LONGER_SHARES) - pace.num_longer :]:
        context = min(int(room.longest * share), LONGER_LIMIT)
        if context < 4 * short:
            continue
        for load in loads:
            if (load == 1 or load * context <= LONGER_ROWS) and load <= room.most_sequences(context):
                yield room.sweep(load, context, _ENDS, sampled=True)


def _loads(most: int, ratio: int) -> list[int]:
    """1, then by powers of the ratio up to the most, that among them."""
    loads = [1]
    while loads[-1] * ratio < most:
        loads.append(loads[-1] * ratio)
    return sorted({*loads, most})


class _Room:
    """What a rank's pools and limits hold."""

    def __init__(self, description: WorkerDescription, max_step_tokens: int) -> None:
        self._description = description
        self._max_step_tokens = max_step_tokens
        # A visit with the longest drafts, all of which stand, and the prompt's own token.
        self._least_tokens = 2 + 6 * (1 + description.gamma_max)

    @property
    def longest(self) -> int:
        """Tokens of a prompt that leave room for a visit."""
        return self._description.max_model_len - self._least_tokens - self._num_reading(1, 1)

    def most_sequences(self, context: int) -> int:
        most = min(self._description.num_slots, self._max_step_tokens)
        while most and self._max_tokens(most, context) < self._least(most, context):
            most -= 1
        return most

    def sweep(self, load: int, context: int, steps: Steps, *, sampled: bool) -> Sweep:
        gamma_max = self._description.gamma_max
        visits = [
            self._visit(load, waiting, steps.shares)
            for waiting in sorted({gamma_max, *(each for each in steps.waiting if each < gamma_max)})
        ]
        least, most = self._least(load, context), self._max_tokens(load, context)
        return Sweep(sampled, load, context, min(most, max(GROWTH, least)), tuple(visits))

    def _visit(self, load: int, waiting: int, shares: tuple[float, ...]) -> Visit:
        """With no more rows than a step holds."""
        most = self._max_step_tokens - load
        return Visit(waiting, tuple(sorted({min(round(load * waiting * share), most) for share in shares})))

    def _least(self, load: int, context: int) -> int:
        return self._least_tokens + self._num_reading(load, context)

    def _num_reading(self, load: int, context: int) -> int:
        """Steps in which the first sequences decode while the last ones read their prompts, at most."""
        return -(-load * context // max(1, self._max_step_tokens // 4)) + 1

    def _max_tokens(self, load: int, context: int) -> int:
        """That each of so many sequences may emit."""
        one = self._description
        pages = min(one.num_pages, default=0) // load
        held = pages * one.page_size - num_reserved_tokens(0, one.gamma_max)
        return min(held, one.max_model_len) - context
