"""What the engine counts, and the frozen view of it that others read. Knows no metric names and no wire format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from runtime.histogram import Histogram, HistogramView
from runtime.live import RequestStatistics
from runtime.settlement import Outcome
from workers.plan import StepResult, StepTimings

STEP_BOUNDS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Buckets of whole steps."""
OVERHEAD_BOUNDS_S = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0),
)
"""Buckets of what a step takes beyond its slowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Pages of one cache group; the null page is not counted."""

    group: str
    free: int
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """What one data-parallel rank holds: sequences, slots, and pages per cache group."""

    running: int
    slots_free: int
    slots_used: int
    pages: tuple[PoolUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """A moment of the engine. Counters run from start to stop, over all lives of the group.

    dp_ranks: the use of each data-parallel rank; running, slots_free, slots_used and pages are sums over them.
    waiting: requests in the queue.
    steps, rounds: steps in which any sequence ran; passes that sampled, counted per sequence.
    emitted, trimmed, drafted, admitted, accepted: tokens; trimmed ones were verified but cut off by a stop or a limit.
        emitted = accepted + rounds − trimmed.
    drafted_per_position, admitted_per_position, accepted_per_position: draft k, from 0, of γ_max.
    timings: sums over steps of what the slowest rank of each spent, collectives, dispatch and combine among it.
    expert_steps: steps in which expert rows were computed.
    expert_imbalance_sum: over those, the sum of the busiest rank's rows over the ranks' mean.
    execute_s: seconds from handing over a plan to its result.
    host_s: seconds from a result to the next plan: booking, verdicts, planning. The rest overlaps with execute_s.
    step_s, step_overhead_s: seconds of each step, and of them what it took beyond its slowest rank.
    restarts: lives of the group after the first.
    """

    dp_ranks: tuple[RankUse, ...]
    waiting: int
    steps: int
    rounds: int
    emitted: int
    trimmed: int
    drafted_per_position: tuple[int, ...]
    admitted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    timings: StepTimings
    expert_steps: int
    expert_imbalance_sum: float
    execute_s: float
    host_s: float
    step_s: HistogramView
    step_overhead_s: HistogramView
    restarts: int
    requests: RequestStatistics

    @property
    def running(self) -> int:
        return sum(use.running for use in self.dp_ranks)

    @property
    def slots_free(self) -> int:
        return sum(use.slots_free for use in self.dp_ranks)

    @property
    def slots_used(self) -> int:
        return sum(use.slots_used for use in self.dp_ranks)

    @property
    def pages(self) -> tuple[PoolUse, ...]:
        """Per cache group."""
        return tuple(
            PoolUse(group=pools[0].group, free=sum(pool.free for pool in pools), used=sum(pool.used for pool in pools))
            for pools in zip(*(use.pages for use in self.dp_ranks), strict=True)
        )

    @property
    def drafted(self) -> int:
        return sum(self.drafted_per_position)

    @property
    def admitted(self) -> int:
        return sum(self.admitted_per_position)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def accepted_prefixes(self) -> tuple[int, ...]:
        """Rounds that drafted, by how many of their drafts stood, from 0 to γ_max."""
        if not self.drafted_per_position:
            return ()
        at_least = (self.drafted_per_position[0], *self.accepted_per_position, 0)
        return tuple(more - fewer for more, fewer in pairwise(at_least))

    def check_integrity(self) -> list[str]:
        """One line per law of counting that does not hold."""
        problems = []
        columns = (self.drafted_per_position, self.admitted_per_position, self.accepted_per_position)
        if any(not drafted >= admitted >= accepted >= 0 for drafted, admitted, accepted in zip(*columns, strict=True)):
            problems.append(f"counters: drafted, admitted, accepted by position do not fall: {columns}")
        if any(list(column) != sorted(column, reverse=True) for column in columns):
            problems.append(f"counters: drafted, admitted, accepted rise with the position: {columns}")
        if self.emitted != self.accepted + self.rounds - self.trimmed:
            problems.append(
                f"counters: {self.emitted} emitted, but {self.accepted} accepted + {self.rounds} rounds - "
                f"{self.trimmed} trimmed"
            )
        num_live = self.requests.submitted - sum(self.requests.ended.values())
        if num_live != self.running + self.waiting:
            problems.append(f"counters: {num_live} requests have not ended, {self.running} run and {self.waiting} wait")
        return problems

    @property
    def overhead_s(self) -> float:
        """What steps took beyond their slowest rank: planning, links, booking."""
        return self.execute_s + self.host_s - self.timings.total_s

    @property
    def expert_imbalance(self) -> float | None:
        """The busiest rank's expert rows over the ranks' mean, averaged over steps; None before there are any."""
        return self.expert_imbalance_sum / self.expert_steps if self.expert_steps else None


@dataclass(slots=True, kw_only=True)
class Counters:
    """The engine's running sums; fields as in EngineStatistics."""

    steps: int = 0
    rounds: int = 0
    emitted: int = 0
    trimmed: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    admitted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    timings: StepTimings = field(default_factory=StepTimings)
    expert_steps: int = 0
    expert_imbalance_sum: float = 0.0
    execute_s: float = 0.0
    host_s: float = 0.0
    step_s: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    step_overhead_s: Histogram = field(default_factory=lambda: Histogram(OVERHEAD_BOUNDS_S))
    restarts: int = 0

    def fit(self, gamma_max: int) -> None:
        """Makes room for drafts of `gamma_max` tokens; what was counted stays."""
        for counts in (self.drafted_per_position, self.admitted_per_position, self.accepted_per_position):
            counts += [0] * (gamma_max - len(counts))

    def add_round(self, outcome: Outcome) -> None:
        """Counts one pass that sampled, of one sequence."""
        self.rounds += 1
        self.emitted += len(outcome.emitted)
        self.trimmed += outcome.num_accepted + 1 - len(outcome.emitted)
        for position in range(len(outcome.drafted)):
            self.drafted_per_position[position] += 1
            self.admitted_per_position[position] += position < outcome.num_admitted
            self.accepted_per_position[position] += position < outcome.num_accepted

    def trim(self, num_cut: int) -> None:
        """Takes back tokens of the round counted last: a stop string had completed before them."""
        self.emitted -= num_cut
        self.trimmed += num_cut

    def add_step(self, result: StepResult, *, execute_s: float, host_s: float) -> None:
        """Counts one step in which any sequence ran."""
        self.steps += 1
        self.execute_s += execute_s
        self.host_s += host_s
        slowest = result.slowest
        self.timings = _sum(self.timings, slowest)
        self.step_s.observe(execute_s + host_s)
        # A rank has a clock of its own, which may run a little faster.
        self.step_overhead_s.observe(max(0.0, execute_s + host_s - slowest.total_s))
        rows = [timings.expert_rows for timings in result.timings]
        if any(rows):
            self.expert_steps += 1
            self.expert_imbalance_sum += max(rows) * len(rows) / sum(rows)

    def view(self, *, dp_ranks: Sequence[RankUse], waiting: int, requests: RequestStatistics) -> EngineStatistics:
        return EngineStatistics(
            dp_ranks=tuple(dp_ranks),
            waiting=waiting,
            steps=self.steps,
            rounds=self.rounds,
            emitted=self.emitted,
            trimmed=self.trimmed,
            drafted_per_position=tuple(self.drafted_per_position),
            admitted_per_position=tuple(self.admitted_per_position),
            accepted_per_position=tuple(self.accepted_per_position),
            timings=self.timings,
            expert_steps=self.expert_steps,
            expert_imbalance_sum=self.expert_imbalance_sum,
            execute_s=self.execute_s,
            host_s=self.host_s,
            step_s=self.step_s.view(),
            step_overhead_s=self.step_overhead_s.view(),
            restarts=self.restarts,
            requests=requests,
        )


def _sum(one: StepTimings, other: StepTimings) -> StepTimings:
    return StepTimings(
        **{part.name: getattr(one, part.name) + getattr(other, part.name) for part in fields(StepTimings)}
    )
