"""A line for a step that took long, with what took the time; at most one in a second. Knows no exporter.

Where ranks wait for one of them, the time is that rank's: of all ranks the busiest one, which spent least of its step
in collectives, is looked at, and what it spent there is what moving data took. On GPUs, times of a rank's parts are
those of launching work, but for the last part, which waits for all of it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from runtime.observe.records import StepRecord
from workers.plan import StepTimings

log = logging.getLogger(__name__)

DISTANCE_S = 1.0
"""From one line to the next."""

WAITED_SHARE = 0.25
"""Of a step, the part that another rank spent waiting, from which on the line says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What took most of a step: a part of it, how long that took, and the rank it is of; None for the host's parts."""

    part: str
    took_s: float
    rank: int | None


def cause_of(record: StepRecord) -> Cause:
    """The longest part. Pure."""
    timings = record.result.timings
    busiest = max(range(len(timings)), key=lambda rank: _own_s(timings[rank]))
    ours = {"planning": record.plan_s, "booking": record.book_s, "link": record.link_s}
    parts = _parts_of(timings[busiest])
    part, took_s = max((ours | parts).items(), key=lambda item: item[1])
    return Cause(part=part, took_s=took_s, rank=busiest if part in parts else None)


def waited_s(record: StepRecord) -> float:
    """The longest that any rank waited for the busiest one."""
    least = min(timings.collective_s for timings in record.result.timings)
    return max(timings.collective_s for timings in record.result.timings) - least


def _own_s(timings: StepTimings) -> float:
    return timings.total_s - timings.collective_s


def _parts_of(timings: StepTimings) -> dict[str, float]:
    """Of one rank. Collectives lie within the other parts; which of them held how much is not known, so they are taken
    out of all alike."""
    own = _own_s(timings) / timings.total_s if timings.total_s > 0 else 0.0
    return {
        "target": own * timings.target_s,
        "verify": own * timings.verify_s,
        "commit": own * timings.commit_s,
        "draft": own * timings.draft_s,
        "collectives": timings.collective_s,
    }


class SlowSteps:
    """Looks at every step. clock: seconds; tests pass their own."""

    def __init__(self, slow_step_ms: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = slow_step_ms / 1000
        self._clock = clock
        self._last_s = -math.inf
        self._num_untold = 0
        self._most_rows = 0

    def note(self, record: StepRecord) -> None:
        num_rows = record.num_rows
        if record.is_first:  # other ranks: what the last ones had compiled is gone
            self._most_rows = 0
        is_largest = num_rows > self._most_rows
        self._most_rows = max(self._most_rows, num_rows)
        if record.took_s < self._limit_s:
            return
        now_s = self._clock()
        if now_s - self._last_s < DISTANCE_S:
            self._num_untold += 1
            return
        self._last_s = now_s
        self._tell(record, num_rows, is_largest=is_largest)
        self._num_untold = 0

    def _tell(self, record: StepRecord, num_rows: int, *, is_largest: bool) -> None:
        cause, waiting_s = cause_of(record), waited_s(record)
        timings = record.result.timings[cause.rank or 0] if cause.rank is not None else record.result.slowest
        notes = []
        if record.is_first:
            notes.append("the first that these ranks serve")
        elif is_largest:
            notes.append("the most rows that these ranks have had in a step")
        if waiting_s > WAITED_SHARE * record.took_s and cause.rank is not None:
            notes.append(f"other ranks waited up to {1000 * waiting_s:.0f} ms for rank {cause.rank}")
        if self._num_untold:
            notes.append(f"{self._num_untold} more slow steps since the last line")
        log.warning(
            "slow step: %.0f ms, of which %s took %.0f ms%s",
            1000 * record.took_s,
            cause.part
            if cause.rank is None or len(record.result.timings) == 1
            else f"{cause.part} on rank {cause.rank}",
            1000 * cause.took_s,
            "".join(f"; {note}" for note in notes),
            extra={
                "step": record.plan.step_id,
                "epoch": record.plan.epoch,
                "cause": cause.part,
                "rank": cause.rank,
                "sequences": record.plan.num_sequences,
                "rows": num_rows,
                "prompt_rows": record.num_prompt_rows,
                "gamma": record.plan.gamma,
                **{f"{name}_ms": round(1000 * took_s, 3) for name, took_s in _times(record, timings).items()},
            },
        )


def _times(record: StepRecord, timings: StepTimings) -> dict[str, float]:
    return {
        "planning": record.plan_s,
        "link": record.link_s,
        "target": timings.target_s,
        "verify": timings.verify_s,
        "commit": timings.commit_s,
        "draft": timings.draft_s,
        "collectives": timings.collective_s,
        "booking": record.book_s,
    }
