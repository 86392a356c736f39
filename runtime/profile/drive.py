"""Synthetic sequences on a loaded group, step by step, through the engine's own scheduler and books. Knows no engine,
no front and no figures."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from configs.schema import ServeSettings
from runtime.books import Books
from runtime.events import ErrorEvent, EventSink, TokenEvent, Verdict
from runtime.life import Life, begin_life
from runtime.link import LoadedGroup
from runtime.live import EarlyEnd
from runtime.profile.pinned import PinnedPlanner
from runtime.request import Request, SamplingParams, StopParams
from workers.plan import VERIFY_EVERYTHING, StepPlan, StepTimings

SEED = 0x0F11E


class ProfileError(RuntimeError):
    """The group cannot be measured. The text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step. wall_s: from planning to booking. rows: of a data-parallel rank's target pass. context: mean committed
    length before it. slowest: that rank's times. expert_rows: by rank."""

    wall_s: float
    rows: int
    context: float
    slowest: StepTimings
    expert_rows: tuple[int, ...]


class SyntheticLoad:
    """Equally many sequences on every data-parallel rank, of random tokens, that end when they are told to. The same
    calls on the same ranks bring the same tokens.

    group: on which nothing else runs. life: its books; the next life of the same ranks goes on from there
    (`begin_life(..., last=life)`), since ids of steps and epochs of slots must rise as long as ranks live.
    """

    def __init__(self, group: LoadedGroup, settings: ServeSettings) -> None:
        """Raises ValueError when the step size does not suit the ranks."""
        self.group = group
        self._books = Books(_Nobody(), max_waiting=lambda: 2**31, clock=time.monotonic)
        self.life: Life = begin_life(group, self._books.queue, settings, None, now_s=0.0)
        self._books.adopt(self.life)
        self._link, self._dp = group.link, group.mesh.dp
        self._vocab_size = group.description.vocab_size
        self._random = random.Random(SEED)
        self._planner = PinnedPlanner()
        self._num_sequences = self._num_left = 0

    @property
    def num_left(self) -> int:
        """Tokens that each sequence may still emit and go on; 0 where none runs."""
        return max(0, self._num_left)

    async def fill(self, num_sequences: int, *, context: int, max_tokens: int, temperature: float) -> None:
        """Begins so many on each data-parallel rank, ends those that run, and reads the prompts. The drafter sees them.

        Raises ProfileError when one of them ends before it is told to.
        """
        await self.clear()
        for _ in range(num_sequences * self._dp):
            self._books.accept(self._request(context, max_tokens, temperature))
        self._num_sequences, self._num_left = num_sequences, max_tokens
        self._pin(gamma=0, feeds_drafter=True, budget=VERIFY_EVERYTHING)
        scheduler = self.life.scheduler
        while scheduler.queue or any(sequence.is_prefilling for sequence in scheduler.running):
            await self._step()
        # Prompts of equal length that share nothing go to the ranks in turn.
        assert all(len(one.ledger) == num_sequences for one in scheduler.schedulers)

    async def decode(self, *, gamma: int, budget: int) -> StepRecord:
        """One step of all sequences that draws γ drafts for each and verifies `budget` rows of a rank's at most."""
        self._pin(gamma=gamma, feeds_drafter=gamma > 0, budget=budget)
        return await self._step()

    async def clear(self) -> None:
        """Ends what runs and tells the ranks."""
        for uid in list(self._books.live):
            self._books.end(uid, EarlyEnd.ABORTED)
        self._books.outbox.take()
        self._num_sequences = self._num_left = 0
        self._pin(gamma=0, feeds_drafter=False, budget=VERIFY_EVERYTHING)
        while self.life.scheduler.has_work:
            await self._step()

    def check_integrity(self) -> list[str]:
        """One line per violated invariant of the books; empty when all hold."""
        return self._books.check_integrity()

    def _pin(self, *, gamma: int, feeds_drafter: bool, budget: int) -> None:
        planner = self._planner
        planner.gamma, planner.feeds_drafter, planner.budget = gamma, feeds_drafter, budget

    async def _step(self) -> StepRecord:
        books, scheduler = self._books, self.life.scheduler
        began = time.perf_counter()
        plan = scheduler.plan(self._planner)
        books.note_starts(plan)
        result = await self._link.execute(plan)
        for event in books.settle(plan.step_id, books.rounds(plan, result)):
            books.outbox.hold(event)
        books.deliver(books.outbox.take())
        wall_s = time.perf_counter() - began
        if len(books.live) != self._num_sequences * self._dp:
            raise ProfileError(f"{len(books.live)} of {self._num_sequences * self._dp} sequences are left")
        if plan.num_sequences:
            self.life.num_steps += 1
            self._num_left = min(self._num_left, *self._left())
        return StepRecord(
            wall_s=wall_s,
            rows=_rows(plan),
            context=_context(plan),
            slowest=result.slowest,
            expert_rows=tuple(timings.expert_rows for timings in result.timings),
        )

    def _left(self) -> list[int]:
        return [
            self._books.live[sequence.uid].request.stopping.max_tokens - len(sequence.log.emitted) - 1
            for sequence in self.life.scheduler.running
        ]

    def _request(self, context: int, max_tokens: int, temperature: float) -> Request:
        uid = self._books.intake.next_uid()
        return Request(
            uid=uid,
            request_id=f"profile-{uid}",
            prompt=tuple(self._random.choices(range(self._vocab_size), k=context)),
            sampling=SamplingParams(temperature=temperature, seed=uid),
            stopping=StopParams(max_tokens=max_tokens),
        )


class _Nobody(EventSink):
    """A front without clients."""

    def deliver(self, events: list[TokenEvent | ErrorEvent]) -> list[Verdict]:
        return []


def _rows(plan: StepPlan) -> int:
    """Of the busiest data-parallel rank."""
    return max(sum(batch.num_known) + min(sum(batch.num_drafts), batch.verify_budget) for batch in plan.batches)


def _context(plan: StepPlan) -> float:
    lengths = [length for batch in plan.batches for length in batch.max_committed]
    return sum(lengths) / max(1, len(lengths))
