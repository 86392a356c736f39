"""What the engine counts, and the frozen view of it that others read. Knows no metric names and no wire format."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.settlement import Outcome
from workers.plan import StepTimings


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Pages of one cache group; the null page is not counted."""

    group: str
    free: int
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """A moment of the engine. Counters run from start to stop, over all lives of the worker.

    running, waiting: sequences that hold a slot; requests in the queue.
    steps, rounds: passes of the batch; passes that sampled, counted per sequence.
    emitted, drafted, admitted, accepted: tokens.
    drafted_per_position, admitted_per_position, accepted_per_position: draft k, from 0, of γ_max.
    timings: sums of the worker's own seconds.
    execute_s: seconds from handing over a plan to its result.
    host_s: seconds from a result to the next plan: booking, verdicts, planning. The rest overlaps with execute_s.
    restarts: lives of the worker after the first.
    """

    running: int
    waiting: int
    slots_free: int
    slots_used: int
    pages: tuple[PoolUse, ...]
    steps: int
    rounds: int
    emitted: int
    drafted: int
    admitted: int
    accepted: int
    drafted_per_position: tuple[int, ...]
    admitted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    timings: StepTimings
    execute_s: float
    host_s: float
    restarts: int


@dataclass(slots=True, kw_only=True)
class Counters:
    """The engine's running sums; fields as in EngineStatistics."""

    steps: int = 0
    rounds: int = 0
    emitted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    admitted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    timings: StepTimings = field(default_factory=StepTimings)
    execute_s: float = 0.0
    host_s: float = 0.0
    restarts: int = 0

    def fit(self, gamma_max: int) -> None:
        """Makes room for drafts of `gamma_max` tokens; what was counted stays."""
        for counts in (self.drafted_per_position, self.admitted_per_position, self.accepted_per_position):
            counts += [0] * (gamma_max - len(counts))

    def add_round(self, outcome: Outcome) -> None:
        """Counts one pass that sampled, of one sequence."""
        self.rounds += 1
        self.emitted += len(outcome.emitted)
        for position in range(len(outcome.drafted)):
            self.drafted_per_position[position] += 1
            self.admitted_per_position[position] += position < outcome.num_admitted
            self.accepted_per_position[position] += position < outcome.num_accepted

    def add_step(self, timings: StepTimings, *, execute_s: float, host_s: float) -> None:
        """Counts one pass of the batch."""
        self.steps += 1
        self.execute_s += execute_s
        self.host_s += host_s
        self.timings = StepTimings(
            total_s=self.timings.total_s + timings.total_s,
            target_s=self.timings.target_s + timings.target_s,
            verify_s=self.timings.verify_s + timings.verify_s,
            commit_s=self.timings.commit_s + timings.commit_s,
            draft_s=self.timings.draft_s + timings.draft_s,
        )

    def view(
        self, *, running: int, waiting: int, slots_free: int, slots_used: int, pages: tuple[PoolUse, ...]
    ) -> EngineStatistics:
        return EngineStatistics(
            running=running,
            waiting=waiting,
            slots_free=slots_free,
            slots_used=slots_used,
            pages=pages,
            steps=self.steps,
            rounds=self.rounds,
            emitted=self.emitted,
            drafted=sum(self.drafted_per_position),
            admitted=sum(self.admitted_per_position),
            accepted=sum(self.accepted_per_position),
            drafted_per_position=tuple(self.drafted_per_position),
            admitted_per_position=tuple(self.admitted_per_position),
            accepted_per_position=tuple(self.accepted_per_position),
            timings=self.timings,
            execute_s=self.execute_s,
            host_s=self.host_s,
            restarts=self.restarts,
        )
