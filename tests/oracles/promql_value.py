"""What a query comes to over recorded scrapes. Knows no wire format.

Rates are of the samples inside the range, without the extrapolation to its ends that Prometheus makes.
"""

from __future__ import annotations

import math
import operator
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from oracles.promql import Aggregation, Binary, Call, Number, Query, Selector, read

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
LOOKBACK_S = 300.0

ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda one, other: one / other if other else math.nan if one == 0 or math.isnan(one) else math.inf,
    "%": math.fmod,
}
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "count": len,
    "avg": lambda values: sum(values) / len(values),
}


class Recorded:
    """Series of samples by time, as a scraper keeps them."""

    def __init__(self) -> None:
        self._series: dict[str, dict[Labels, tuple[list[float], list[float]]]] = defaultdict(dict)

    def add(self, name: str, labels: Mapping[str, str], time_s: float, value: float) -> None:
        times, values = self._series[name].setdefault(frozenset(labels.items()), ([], []))
        times.append(time_s)
        values.append(value)

    def at(self, query: str | Query, time_s: float) -> Vector | float:
        """A vector without the names of metrics, or a number."""
        query = read(query) if isinstance(query, str) else query
        match query:
            case Number(value=value):
                return value
            case Selector():
                return {
                    labels: values[place - 1]
                    for labels, times, values in self._select(query)
                    if (place := bisect_right(times, time_s)) and times[place - 1] > time_s - LOOKBACK_S
                }
            case Call():
                return self._call(query, time_s)
            case Aggregation():
                return self._aggregate(query, time_s)
            case Binary():
                return self._join(query, time_s)

    def _select(self, selector: Selector) -> Iterable[tuple[Labels, list[float], list[float]]]:
        for labels, (times, values) in self._series.get(selector.name, {}).items():
            held = dict(labels)
            if all(_fits(held.get(label, ""), sign, wanted) for label, sign, wanted in selector.matchers):
                yield labels, times, values

    def _call(self, call: Call, time_s: float) -> Vector | float:
        if call.function == "time":
            return time_s
        if call.function == "histogram_quantile":
            share, buckets = (self.at(argument, time_s) for argument in call.arguments)
            assert isinstance(share, float)
            assert isinstance(buckets, dict)
            return _quantiles(share, buckets)
        first = call.arguments[0]
        if call.function in ("absent", "vector"):
            value = self.at(first, time_s)
            if call.function == "vector":
                assert isinstance(value, float)
                return {frozenset(): value}
            return {} if value else {frozenset(): 1.0}
        if call.function.startswith("clamp"):
            bound = self.at(call.arguments[1], time_s)
            vector = self.at(first, time_s)
            assert isinstance(bound, float)
            assert isinstance(vector, dict)
            clamp = max if call.function == "clamp_min" else min
            return {labels: clamp(value, bound) for labels, value in vector.items()}
        assert isinstance(first, Selector)
        assert first.range_s is not None
        found: Vector = {}
        for labels, times, values in self._select(first):
            inside = slice(bisect_right(times, time_s - first.range_s), bisect_right(times, time_s))
            value = _over(call.function, times[inside], values[inside], first.range_s)
            if value is not None:
                found[labels] = value
        return found

    def _aggregate(self, query: Aggregation, time_s: float) -> Vector:
        *parameters, last = query.arguments
        vector = self.at(last, time_s)
        assert isinstance(vector, dict)
        if query.function == "topk":
            number = self.at(parameters[0], time_s)
            assert isinstance(number, float)
            return dict(sorted(vector.items(), key=lambda item: -item[1])[: int(number)])
        groups: dict[Labels, list[float]] = defaultdict(list)
        for labels, value in vector.items():
            groups[_kept(labels, query.by, is_without=query.is_without)].append(value)
        return {labels: float(AGGREGATES[query.function](values)) for labels, values in groups.items()}

    def _join(self, query: Binary, time_s: float) -> Vector | float:
        left, right = self.at(query.left, time_s), self.at(query.right, time_s)
        if isinstance(left, float) and isinstance(right, float):
            return ARITHMETIC[query.operator](left, right)
        if isinstance(left, float):
            assert isinstance(right, dict)
            return _scalar(query, [(labels, left, value, value) for labels, value in right.items()])
        if isinstance(right, float):
            return _scalar(query, [(labels, value, right, value) for labels, value in left.items()])

        def key(labels: Labels) -> Labels:
            if query.on is None:
                return labels
            return _kept(labels, query.on, is_without=query.is_ignoring)

        keys = {key(labels) for labels in right}
        match query.operator:
            case "and":
                return {labels: value for labels, value in left.items() if key(labels) in keys}
            case "unless":
                return {labels: value for labels, value in left.items() if key(labels) not in keys}
            case "or":
                return left | {labels: value for labels, value in right.items() if key(labels) not in map(key, left)}
        if query.many == "right":
            one = _by_key(left, key)
            return _scalar(query, [(a, one[key(a)], b, b) for a, b in right.items() if key(a) in one])
        one = _by_key(right, key)
        if not query.many:
            _by_key(left, key)
        pairs = [(a, b, one[key(a)], b) for a, b in left.items() if key(a) in one]
        return _scalar(query, pairs)


def _scalar(query: Binary, pairs: Iterable[tuple[Labels, float, float, float]]) -> Vector:
    """pairs: labels, both sides, and what stays where a comparison holds."""
    if query.operator in ARITHMETIC:
        return {labels: ARITHMETIC[query.operator](one, other) for labels, one, other, _ in pairs}
    holds = COMPARISONS[query.operator]
    if query.is_bool:
        return {labels: float(holds(one, other)) for labels, one, other, _ in pairs}
    return {labels: kept for labels, one, other, kept in pairs if holds(one, other)}


def _by_key(vector: Vector, key: Callable[[Labels], Labels]) -> dict[Labels, float]:
    found = {key(labels): value for labels, value in vector.items()}
    assert len(found) == len(vector), "several on a side where one may be"
    return found


def _kept(labels: Labels, names: Sequence[str], *, is_without: bool) -> Labels:
    return frozenset((name, value) for name, value in labels if (name in names) != is_without)


def _fits(held: str, sign: str, wanted: str) -> bool:
    is_equal = re.fullmatch(wanted, held) is not None if "~" in sign else held == wanted
    return is_equal != sign.startswith("!")


def _over(function: str, times: Sequence[float], values: Sequence[float], range_s: float) -> float | None:
    """None where there are too few samples."""
    match function:
        case "min_over_time" | "max_over_time" | "avg_over_time":
            return AGGREGATES[function[:3]](values) if values else None
        case "changes":
            return float(sum(one != other for one, other in pairwise(values))) if values else None
    if len(times) < 2:
        return None
    if function == "deriv":
        mean_time, mean = sum(times) / len(times), sum(values) / len(values)
        spread = sum((time - mean_time) ** 2 for time in times)
        return sum((time - mean_time) * (value - mean) for time, value in zip(times, values, strict=True)) / spread
    # A counter that falls has begun anew from 0.
    rise = sum(later if later < earlier else later - earlier for earlier, later in pairwise(values))
    rate = rise / (times[-1] - times[0])
    return rate if function == "rate" else rate * range_s


def _quantiles(share: float, buckets: Vector) -> Vector:
    """Linear within a bucket; the bound below the last one where it falls there."""
    groups: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, count in buckets.items():
        bound = float(dict(labels)["le"])
        groups[_kept(labels, ("le",), is_without=True)].append((bound, count))
    found: Vector = {}
    for labels, group in groups.items():
        group.sort()
        total = group[-1][1]
        if not total or len(group) < 2:
            found[labels] = math.nan
            continue
        rank = share * total
        place = next(place for place, (_, count) in enumerate(group) if count >= rank)
        low, below = group[place - 1] if place else (0.0, 0.0)
        high, count = group[place]
        found[labels] = low if math.isinf(high) else low + (high - low) * (rank - below) / (count - below)
    return found
