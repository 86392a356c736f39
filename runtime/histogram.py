"""Counts of observations by size, and the frozen view of them. Knows no metric and no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramView:
    """bounds: upper bounds of the buckets, inclusive, rising; one more bucket has none.
    counts: observations per bucket, one entry more than bounds. total: sum of the observed values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Observations in buckets. bounds: as in HistogramView."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def view(self) -> HistogramView:
        return HistogramView(bounds=self._bounds, counts=tuple(self._counts), total=self._total)
