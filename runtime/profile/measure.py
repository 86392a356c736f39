"""Measures a loaded group: sweeps over its loads, cell by cell in turns, and puts the figures together. Knows no files
and no terminal."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

import numpy as np

from configs.schema import ServeSettings
from runtime.profile.document import Cell, Imbalance, Method, Profile, Timing
from runtime.profile.drive import ProfileError, StepRecord, SyntheticLoad
from runtime.profile.grid import QUICK, THOROUGH, Pace, Sweep, Visit, sweeps
from runtime.profile.identity import identity_of
from runtime.profile.levels import levelled
from workers.plan import StepTimings

Progress = Callable[[int, int, str], None]
"""Steps done, steps in all, what is measured now."""

TEMPERATURE = 1.0
"""Of sequences that are sampled: they cost what those of requests that say nothing cost."""


async def measure(
    load: SyntheticLoad,
    settings: ServeSettings,
    progress: Progress = lambda done, total, text: None,
    *,
    quick: bool = False,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Profile:
    """Takes minutes; `quick` measures fewer cells less often. Nothing else may run on the group meanwhile; the load is
    cleared at the end.

    Raises ProfileError where the deployment cannot be measured, WorkerError when a rank is lost.
    """
    pace, group = QUICK if quick else THOROUGH, load.group
    began = time.monotonic()
    try:
        planned = list(sweeps(group.description, max_step_tokens=settings.scheduler.max_step_tokens, pace=pace))
    except ValueError as error:
        raise ProfileError(str(error)) from None
    measuring = _Measuring(load, planned, pace, progress)
    cells = [cell for sweep in planned for cell in await measuring.sweep(sweep)]
    await load.clear()
    row_multiple = max(rank.row_multiple for rank in group.ranks)
    return Profile(
        identity=identity_of(settings, group.mesh, group.ranks),
        created=now().astimezone(UTC).replace(microsecond=0),
        method=Method(
            warmup=pace.warmup,
            repeats=pace.repeats,
            routing="by the model's own gates, of random prompts",
            temperature=TEMPERATURE,
            quick=quick,
            duration_s=round(time.monotonic() - began, 1),
        ),
        tiers=_tiers(row_multiple, settings.scheduler.max_step_tokens),
        imbalance=_imbalance(measuring.expert_rows) if group.mesh.spreads_experts else None,
        cells=tuple(cells),
    )


class _Measuring:
    """Goes through sweeps; keeps what is of all of them."""

    def __init__(self, load: SyntheticLoad, planned: Sequence[Sweep], pace: Pace, progress: Progress) -> None:
        self.load = load
        self.expert_rows: list[tuple[int, ...]] = []
        self._rounds = pace.warmup + pace.repeats
        self._warmup, self._progress = pace.warmup, progress
        self._done, self._total = 0, self._rounds * sum(sweep.num_steps for sweep in planned)
        # Drafts that wait for each sequence.
        self._waiting = 0

    async def sweep(self, sweep: Sweep) -> list[Cell]:
        """Rounds over all cells, each begun at another visit, so that a noisy moment and a grown context meet all."""
        found: dict[tuple[int, int], list[StepRecord]] = defaultdict(list)
        way = "sampled" if sweep.sampled else "greedy"
        text = f"{_count(sweep.num_sequences, 'sequence')}, {way}, context {sweep.context}"
        await self._refill(sweep)
        for number in range(self._rounds):
            start = number % len(sweep.visits)
            for visit in (*sweep.visits[start:], *sweep.visits[:start]):
                self._progress(self._done, self._total, text)
                for budget, record in await self._visit(sweep, visit):
                    if number >= self._warmup:
                        found[visit.waiting, budget].append(record)
                self._done += visit.num_steps
        self._progress(self._done, self._total, text)
        found = levelled(found)
        records = [record for each in found.values() for record in each]
        self.expert_rows += [record.expert_rows for record in records]
        context = float(np.mean([record.context for record in records]))
        return [_cell(sweep, context, waiting, found[waiting, budget]) for waiting, budget in sorted(found)]

    async def _visit(self, sweep: Sweep, visit: Visit) -> list[tuple[int, StepRecord]]:
        need = 1 + self._waiting + len(visit.budgets) * (1 + visit.waiting)
        if self.load.num_left < need:
            await self._refill(sweep)
        most = visit.budgets[-1]
        await self.load.decode(gamma=visit.waiting, budget=most)
        self._waiting = visit.waiting
        return [(budget, await self.load.decode(gamma=visit.waiting, budget=budget)) for budget in visit.budgets]

    async def _refill(self, sweep: Sweep) -> None:
        await self.load.fill(
            sweep.num_sequences,
            context=sweep.context,
            max_tokens=sweep.max_tokens,
            temperature=TEMPERATURE if sweep.sampled else 0.0,
        )
        self._waiting = 0


def _cell(sweep: Sweep, context: float, waiting: int, records: Sequence[StepRecord]) -> Cell:
    def part(seconds: Callable[[StepTimings], float]) -> Timing:
        return _timing(seconds(record.slowest) for record in records)

    return Cell(
        sampled=sweep.sampled,
        num_sequences=sweep.num_sequences,
        context=round(context, 1),
        waiting=waiting,
        gamma=waiting,
        rows=records[0].rows,
        step=_timing(record.wall_s for record in records),
        target=part(lambda times: times.target_s),
        verify=part(lambda times: times.verify_s),
        commit=part(lambda times: times.commit_s),
        draft=part(lambda times: times.draft_s),
        collective=part(lambda times: times.collective_s),
        dispatch=part(lambda times: times.dispatch_s),
        combine=part(lambda times: times.combine_s),
    )


def _timing(seconds: Iterable[float]) -> Timing:
    ms = np.array(list(seconds)) * 1000
    low, median, high = np.percentile(ms, [25, 50, 75])
    return Timing(median=round(float(median), 4), iqr=round(float(high - low), 4), n=len(ms))


def _tiers(row_multiple: int, max_step_tokens: int) -> tuple[int, ...]:
    if row_multiple == 1:
        return ()
    return tuple(range(row_multiple, max_step_tokens + row_multiple, row_multiple))


def _imbalance(expert_rows: Sequence[tuple[int, ...]]) -> Imbalance | None:
    ratios = [max(rows) * len(rows) / sum(rows) for rows in expert_rows if sum(rows)]
    if not ratios:
        return None
    p50, p95 = np.percentile(ratios, [50, 95])
    return Imbalance(p50=round(float(p50), 4), p95=round(float(p95), 4), n=len(ratios))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
