"""Takes out of the times of a sweep what a slow moment added to all of them alike. Pure; knows no cell's meaning.

A neighbour on the machine slows a round over all cells as a whole, or the end of one and the start of the next. Medians
cell by cell would then compare one cell's busy rounds with another's quiet ones, and which draft length is best hangs
on their ratio. So each round has a level: the median, over its cells, of how the time of the slowest rank stands to the
cell's own median (one half-step of Tukey's median polish, Exploratory Data Analysis, 1977, on logarithms). All times
are divided by it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from runtime.profile.drive import StepRecord
from workers.plan import StepTimings

K = TypeVar("K", bound=Hashable)

_SECONDS = tuple(name for name in StepTimings.__slots__ if name.endswith("_s"))


def levelled(found: Mapping[K, Sequence[StepRecord]]) -> dict[K, list[StepRecord]]:
    """found: by cell, one record per round, rounds in order and as many for each cell. Rounds of the usual speed keep
    their times."""
    log_CN = np.log(np.array([[record.slowest.total_s for record in records] for records in found.values()]))
    levels = np.exp(np.median(log_CN - np.median(log_CN, axis=1, keepdims=True), axis=0)).tolist()
    return {
        cell: [_divided(record, level) for record, level in zip(records, levels, strict=True)]
        for cell, records in found.items()
    }


def _divided(record: StepRecord, level: float) -> StepRecord:
    times = record.slowest
    return replace(
        record,
        wall_s=record.wall_s / level,
        slowest=replace(times, **{name: getattr(times, name) / level for name in _SECONDS}),
    )
