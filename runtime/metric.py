"""What a metric is: a name, a kind, a meaning, and how it is read off one frozen moment of the engine. Knows none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from runtime.histogram import HistogramView
from runtime.statistics import EngineStatistics
from runtime.status import EngineStatus

Samples = Iterable[tuple[Mapping[str, object], float]]
"""Values with the labels that tell them apart, the common ones left out."""


class Kind(Enum):
    """COUNTER values only rise from start to stop; their names end in _total. GAUGE values go either way."""

    COUNTER = CounterMetricFamily
    GAUGE = GaugeMetricFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of plain values. read: its samples; labels of the first are the labels of all."""

    name: str
    kind: Kind
    meaning: str
    read: Callable[[EngineStatus], Samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramRow:
    """One metric in buckets."""

    name: str
    meaning: str
    read: Callable[[EngineStatistics], HistogramView]


def counter(name: str, meaning: str, read: Callable[[EngineStatistics], float]) -> Row:
    return Row(name=name, kind=Kind.COUNTER, meaning=meaning, read=lambda status: [({}, read(status.statistics))])


def counters(name: str, meaning: str, read: Callable[[EngineStatistics], Samples]) -> Row:
    return Row(name=name, kind=Kind.COUNTER, meaning=meaning, read=lambda status: read(status.statistics))


def gauge(name: str, meaning: str, read: Callable[[EngineStatus], float]) -> Row:
    return Row(name=name, kind=Kind.GAUGE, meaning=meaning, read=lambda status: [({}, read(status))])


def gauges(name: str, meaning: str, read: Callable[[EngineStatus], Samples]) -> Row:
    return Row(name=name, kind=Kind.GAUGE, meaning=meaning, read=read)


def positions(counts: Iterable[float]) -> Samples:
    return [({"position": position}, count) for position, count in enumerate(counts)]
