"""As much of PromQL as dashboards and alerts here use, read into a tree. Knows no samples.

https://prometheus.io/docs/prometheus/latest/querying/basics/
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

TOKEN = re.compile(
    r"""\s*(?:(?P<duration>\d+(?:ms|[smhdwy])(?![\w:]))
    |(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)
    |(?P<name>[a-zA-Z_:][\w:]*)
    |(?P<variable>\$__?[a-z_]+)
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<sign>=~|!~|!=|==|>=|<=|[-+*/^%()\[\]{},<>=])
    |(?P<end>$))""",
    re.VERBOSE,
)
UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}
VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$__interval": "1m"}
"""Grafana's own, and something that stands for each."""
AGGREGATIONS = {"sum", "max", "min", "avg", "count", "topk"}
RANGE_FUNCTIONS = {"rate", "increase", "deriv", "min_over_time", "max_over_time", "avg_over_time", "changes"}
FUNCTIONS = RANGE_FUNCTIONS | {"histogram_quantile", "absent", "clamp_min", "clamp_max", "time", "vector"}
LEVELS = (("or",), ("and", "unless"), ("==", "!=", ">", "<", ">=", "<="), ("+", "-"), ("*", "/", "%"))
"""Binary operators from the loosest to the tightest."""


class BadQuery(ValueError):
    """The text is no query."""


@dataclass(frozen=True)
class Number:
    value: float


@dataclass(frozen=True)
class Selector:
    """matchers: label, operator, value. range_s: of a range vector; None for an instant one."""

    name: str
    matchers: tuple[tuple[str, str, str], ...] = ()
    range_s: float | None = None


@dataclass(frozen=True)
class Call:
    function: str
    arguments: tuple[Query, ...]


@dataclass(frozen=True)
class Aggregation:
    """by: the labels that are kept; with is_without, those that are not."""

    function: str
    arguments: tuple[Query, ...]
    by: tuple[str, ...] = ()
    is_without: bool = False


@dataclass(frozen=True)
class Binary:
    """on: labels that are compared, None for all; with is_ignoring, those that are not. many: which side may have
    several for one of the other."""

    operator: str
    left: Query
    right: Query
    on: tuple[str, ...] | None = None
    is_ignoring: bool = False
    many: str = ""
    is_bool: bool = False


Query = Number | Selector | Call | Aggregation | Binary


def read(text: str) -> Query:
    """Raises BadQuery that says where."""
    reader = _Reader(text)
    query = reader.binary(0)
    if reader.kind != "end":
        raise BadQuery(f"{reader.token!r} is left in {text!r}")
    return query


def parts(query: Query) -> Iterator[Query]:
    """The query and all that it is made of."""
    yield query
    match query:
        case Call(arguments=inner) | Aggregation(arguments=inner):
            children = inner
        case Binary(left=left, right=right):
            children = (left, right)
        case _:
            children = ()
    for child in children:
        yield from parts(child)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0
        self.kind, self.token = "", ""
        self._next()

    def _next(self) -> None:
        found = TOKEN.match(self._text, self._place)
        if found is None or found.lastgroup is None:
            raise BadQuery(f"nothing known at {self._text[self._place :]!r}")
        self._place, self.kind, self.token = found.end(), found.lastgroup, found[found.lastgroup]
        if self.kind == "variable":
            if self.token not in VARIABLES:
                raise BadQuery(f"unknown variable {self.token}")
            self.kind, self.token = "duration", VARIABLES[self.token]

    def _take(self, *expected: str, kind: str = "") -> str:
        token = self.token
        if (expected and token not in expected) or (kind and self.kind != kind):
            raise BadQuery(f"{token!r} where {expected or kind} is due in {self._text!r}")
        self._next()
        return token

    def _taken(self, token: str) -> bool:
        if self.token != token or self.kind == "string":
            return False
        self._next()
        return True

    def binary(self, level: int) -> Query:
        if level == len(LEVELS):
            return self._unary()
        left = self.binary(level + 1)
        while self.kind in ("sign", "name") and self.token in LEVELS[level]:
            operator = self._take()
            is_bool = self._taken("bool")
            on, is_ignoring, many = None, False, ""
            if self.token in ("on", "ignoring"):
                is_ignoring = self._take() == "ignoring"
                on = self._names()
                if self.token in ("group_left", "group_right"):
                    many = self._take().removeprefix("group_")
                    if self.token == "(":
                        self._names()
            left = Binary(operator, left, self.binary(level + 1), on, is_ignoring, many, is_bool)
        return left

    def _unary(self) -> Query:
        if self._taken("-"):
            return Binary("*", Number(-1.0), self._unary())
        if self._taken("("):
            query = self.binary(0)
            self._take(")")
            return query
        if self.kind == "number":
            return Number(float(self._take()))
        name = self._take(kind="name")
        if name in AGGREGATIONS:
            return self._aggregation(name)
        if self.token == "(":
            if name not in FUNCTIONS:
                raise BadQuery(f"unknown function {name} in {self._text!r}")
            query = Call(name, self._arguments())
            for argument in query.arguments:
                is_range = isinstance(argument, Selector) and argument.range_s is not None
                if is_range != (name in RANGE_FUNCTIONS):
                    raise BadQuery(f"{name} of the wrong kind of vector in {self._text!r}")
            return query
        return self._selector(name)

    def _aggregation(self, name: str) -> Query:
        grouping = self._grouping()
        arguments = self._arguments()
        by, is_without = grouping or self._grouping() or ((), False)
        return Aggregation(name, arguments, by, is_without)

    def _grouping(self) -> tuple[tuple[str, ...], bool] | None:
        if self.token not in ("by", "without"):
            return None
        is_without = self._take() == "without"
        return self._names(), is_without

    def _names(self) -> tuple[str, ...]:
        self._take("(")
        names = []
        while not self._taken(")"):
            names.append(self._take(kind="name"))
            if self.token != ")":
                self._take(",")
        return tuple(names)

    def _arguments(self) -> tuple[Query, ...]:
        self._take("(")
        arguments: list[Query] = []
        while not self._taken(")"):
            arguments.append(self.binary(0))
            if self.token != ")":
                self._take(",")
        return tuple(arguments)

    def _selector(self, name: str) -> Selector:
        matchers = []
        if self._taken("{"):
            while not self._taken("}"):
                label, operator = self._take(kind="name"), self._take("=", "!=", "=~", "!~")
                matchers.append((label, operator, self._take(kind="string")[1:-1]))
                if self.token != "}":
                    self._take(",")
        range_s = None
        if self._taken("["):
            duration = self._take(kind="duration")
            range_s = int(re.match(r"\d+", duration)[0]) * UNITS_S[duration.lstrip("0123456789")]
            self._take("]")
        return Selector(name, tuple(matchers), range_s)
