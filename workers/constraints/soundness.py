"""What is wrong with a constraint that its compiler takes all the same: numbers that it would round, text that is none,
schemas that only outputs without an end meet, grammars that go on behind the end. Pure.

Numbers are doubles there, integers too: 1234567890123456789 would come out as another one.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from workers.constraints.places import Schema, escaped, parts_of

MAX_EXACT = 2**63
"""Integers below it come out digit by digit where a double holds them; from it on as the shortest text of a double."""

_OF_NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_DEFINITIONS = ("$defs", "definitions")
_OPTIONS = "x-guidance"
_TAKEN_OPTIONS = {"whitespace_flexible": bool, "whitespace_pattern": str}
_LARK = re.compile(r'%json\s*|"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>\s"/]+>')
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")

Needs = list[list[str]]
"""Of a schema: of each list one at least, places of other schemas, must have an output of finite length."""


def check_schema(schema: Schema) -> None:
    """Raises ValueError with the place of what is wrong."""
    for place, value in _values("#", schema):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"at {place}: the number is too large, doubles end at 1.8e308")
        if not _is_text(place) or (isinstance(value, str) and not _is_text(value)):
            raise ValueError(f"at {_printable(place)}: half of a surrogate pair is no character")
    parts = _all_parts(schema)
    for pointer, part in parts.items():
        if _OPTIONS in part:
            _check_options(f"{pointer}/{_OPTIONS}", part[_OPTIONS], is_whole=pointer == "#")
    for pointer, part in parts.items():
        for key in _OF_NUMBERS:
            for place, value in _values(f"{pointer}/{key}", part.get(key)):
                if isinstance(value, int) and not _is_exact(value):
                    raise ValueError(f"at {place}: {value} has more digits than numbers keep; take fewer, or a string")
    endless = _endless(parts)
    if endless:
        raise ValueError(f"at {endless}: no output meets it, each would be, or contain, another one of the same")


def embedded_schemas(lark: str) -> Iterator[tuple[int, Schema]]:
    """Those that a Lark grammar has behind %json, as far as they are JSON objects, and their lines, from 1."""
    decoder = json.JSONDecoder()
    at = 0
    while found := _LARK.search(lark, at):
        at = found.end()
        if not found[0].startswith("%json"):
            continue
        line = 1 + lark.count("\n", 0, found.start())
        try:
            schema, at = decoder.raw_decode(lark, at)
        except (ValueError, RecursionError):  # its compiler tells what is wrong there
            continue
        if isinstance(schema, dict):
            yield line, schema


def check_ends(lark: str, ends: Mapping[int, str]) -> None:
    """Raises ValueError with the place where a Lark grammar names a token that ends the output: nothing is followed
    behind it, and the grammar's own end needs none. ends: such tokens and their names."""
    at = 0
    while found := _LARK.search(lark, at):
        at = found.end()
        token = found[0]
        if token in ends.values() or (token.startswith("<[") and any(_has(token[2:-2], end) for end in ends)):
            line, column = 1 + lark.count("\n", 0, found.start()), found.start() - lark.rfind("\n", 0, found.start())
            raise ValueError(f"line {line}, column {column}: {token} ends the output, which needs no token for that")


def _has(listed: str, token: int) -> bool:
    """Whether ids and ranges of them, comma between, name a token. Of all but some, as [^1], an end is not meant."""
    found = (_RANGE.fullmatch(one) for one in listed.split(","))
    return any(int(one[1]) <= token <= int(one[2] or one[1]) for one in found if one)


def _check_options(place: str, options: Any, *, is_whole: bool) -> None:
    """Of what the compiler may be told beside a schema, what is not about its meaning."""
    taken = " and ".join(_TAKEN_OPTIONS)
    if not is_whole or not isinstance(options, dict):
        raise ValueError(f"at {place}: is an object with {taken}, of the whole schema alone")
    for name, value in options.items():
        kind = _TAKEN_OPTIONS.get(name)
        if kind is None:
            raise ValueError(f"at {place}/{escaped(name)}: is not taken; {taken} are")
        if not isinstance(value, kind):
            raise ValueError(f"at {place}/{name}: is {'true or false' if kind is bool else 'an expression'}")


def _is_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _values(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """All that is neither a list nor an object, with its place."""
    open_values = [(place, value)]
    while open_values:
        place, value = open_values.pop()
        if isinstance(value, dict):
            open_values += [(f"{place}/{escaped(name)}", inner) for name, inner in value.items()]
        elif isinstance(value, list):
            open_values += [(f"{place}/{i}", inner) for i, inner in enumerate(value)]
        else:
            yield place, value


def _is_exact(number: int) -> bool:
    double = float(number)
    return int(double) == number and (abs(number) < MAX_EXACT or int(Decimal(repr(double))) == number)


def _all_parts(schema: Schema) -> dict[str, Schema]:
    """All schemas in a schema, by place."""
    found = {"#": schema}
    open_places = ["#"]
    while open_places:
        pointer = open_places.pop()
        part = found[pointer]
        inner_parts = dict(parts_of(schema, pointer, part))
        for key in _DEFINITIONS:
            if isinstance(part.get(key), dict):
                inner_parts |= {f"{pointer}/{key}/{escaped(name)}": inner for name, inner in part[key].items()}
        for place, inner in inner_parts.items():
            if place not in found and isinstance(inner, dict):
                found[place] = inner
                open_places.append(place)
    return found


def _endless(parts: dict[str, Schema]) -> str:
    """Where a schema, if the whole has no output of finite length, needs one of itself; "" if it has one.

    The least fixed point: finite is what needs nothing, and what needs nothing else than that.
    """
    needs = {pointer: _needs(pointer, part, parts) for pointer, part in parts.items()}
    wanted_by = defaultdict(list)
    for pointer, all_of in needs.items():
        for place in {place for one_of in all_of for place in one_of}:
            wanted_by[place].append(pointer)
    finite: set[str] = set()
    # Inner ones first; what comes to be finite may make finite what needs it.
    queue = deque(reversed(parts))
    queued = set(parts)
    while queue:
        pointer = queue.popleft()
        queued.remove(pointer)
        if all(not finite.isdisjoint(one_of) for one_of in needs[pointer]):
            finite.add(pointer)
            for place in wanted_by[pointer]:
                if place not in finite and place not in queued:
                    queue.append(place)
                    queued.add(place)
    if "#" in finite:
        return ""
    pointer, seen = "#", set()
    while pointer not in seen:
        seen.add(pointer)
        pointer = next(one_of[0] for one_of in needs[pointer] if finite.isdisjoint(one_of))
    return pointer


def _needs(pointer: str, part: Schema, parts: dict[str, Schema]) -> Needs:
    if "const" in part or "enum" in part:
        return []
    needs = [[part["$ref"]]] if isinstance(part.get("$ref"), str) else []
    needs += [[place] for place in _listed(pointer, part, "allOf")]
    needs += [branches for key in ("anyOf", "oneOf") if (branches := _listed(pointer, part, key))]
    kind = part.get("type")
    if kind in ("object", ["object"]):
        needs += [[place] for place in _required(pointer, part)]
    if kind in ("array", ["array"]):
        needs += [[place] for place in _first_items(pointer, part)]
    # What is no schema of the whole, as `true` or one of another document, is left to the compiler.
    return [one_of for one_of in needs if all(place in parts for place in one_of)]


def _listed(pointer: str, part: Schema, key: str) -> list[str]:
    listed = part.get(key)
    return [f"{pointer}/{key}/{i}" for i in range(len(listed))] if isinstance(listed, list) else []


def _required(pointer: str, part: Schema) -> list[str]:
    """Where the properties are that an object must have."""
    names, properties = part.get("required"), part.get("properties", {})
    if not isinstance(names, list) or not isinstance(properties, dict):
        return []
    places = []
    for name in names:
        if isinstance(name, str) and name in properties:
            places.append(f"{pointer}/properties/{escaped(name)}")
        elif "patternProperties" not in part:
            places.append(f"{pointer}/additionalProperties")
    return places


def _first_items(pointer: str, part: Schema) -> list[str]:
    """Where the items are that an array must have."""
    count = part.get("minItems", 0)
    if not isinstance(count, int | float):
        return []
    first = _listed(pointer, part, "prefixItems")
    return first[: int(count)] if count <= len(first) else [*first, f"{pointer}/items"]
