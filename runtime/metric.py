"""What a metric is: a name, a kind, a meaning, and how it is read off one frozen moment of the server. Knows none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from runtime.histogram import HistogramView
from runtime.statistics import EngineStatistics
from runtime.status import EngineStatus, FrontStatus

Labels = Mapping[str, object]
Samples = Iterable[tuple[Labels, float]]
"""Values with the labels that tell them apart, the common ones left out."""
Views = Iterable[tuple[Labels, HistogramView]]


class Kind(Enum):
    """COUNTER values only rise from start to stop; their names end in _total. GAUGE values go either way."""

    COUNTER = CounterMetricFamily
    GAUGE = GaugeMetricFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of plain values. labels: those that every sample has, in order. read: its samples."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    read: Callable[[EngineStatus], Samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRow:
    """A metric as `Row` has it, of the front: there are figures of it from the moment that the server listens."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    read: Callable[[FrontStatus], Samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramRow:
    """One metric in buckets. labels: beside that of the buckets."""

    name: str
    meaning: str
    labels: tuple[str, ...] = ()
    read: Callable[[EngineStatistics], Views]


def counter(name: str, meaning: str, read: Callable[[EngineStatistics], float]) -> Row:
    return counters(name, meaning, (), lambda statistics: [({}, read(statistics))])


def counters(name: str, meaning: str, labels: tuple[str, ...], read: Callable[[EngineStatistics], Samples]) -> Row:
    return Row(
        name=name,
        kind=Kind.COUNTER,
        meaning=meaning,
        labels=labels,
        read=lambda status: read(status.statistics),
    )


def status_counter(name: str, meaning: str, read: Callable[[EngineStatus], float]) -> Row:
    """A counter that the engine's own sums do not have."""
    return Row(name=name, kind=Kind.COUNTER, meaning=meaning, read=lambda status: [({}, read(status))])


def gauge(name: str, meaning: str, read: Callable[[EngineStatus], float]) -> Row:
    return gauges(name, meaning, (), lambda status: [({}, read(status))])


def gauges(name: str, meaning: str, labels: tuple[str, ...], read: Callable[[EngineStatus], Samples]) -> Row:
    return Row(name=name, kind=Kind.GAUGE, meaning=meaning, labels=labels, read=read)


def front_gauge(name: str, meaning: str, read: Callable[[FrontStatus], float]) -> FrontRow:
    return FrontRow(name=name, kind=Kind.GAUGE, meaning=meaning, read=lambda status: [({}, read(status))])


def histogram(name: str, meaning: str, read: Callable[[EngineStatistics], HistogramView]) -> HistogramRow:
    return HistogramRow(name=name, meaning=meaning, read=lambda statistics: [({}, read(statistics))])


def positions(counts: Iterable[float]) -> Samples:
    return [({"position": position}, count) for position, count in enumerate(counts)]
