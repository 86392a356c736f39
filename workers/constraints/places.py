"""Where in a JSON schema lies what its compiler complains of: the compiler itself does not say. Pure.

Parts are tried alone, with the definitions of the whole, from the top on; the innermost that has the same fault is it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

MAX_TRIALS = 256
"""Parts that are tried; most take less than a millisecond."""

_OF_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains")
_OF_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_NAMED = ("properties", "patternProperties", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")
_UNSATISFIABLE = "Unsatisfiable schema"


def find_place(schema: Schema, told: str, complaint: Callable[[Schema], str]) -> tuple[str, str]:
    """JSON pointer of the fault, from "#" on, and what is told of it there.

    told: what is told of the whole. complaint: what is told of a schema, "" where it is good.
    """
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    pointer, part, seen = "#", schema, {"#"}
    trials = 0
    descending = True
    while descending:
        descending = False
        for place, inner in parts_of(schema, pointer, part):
            trials += 1
            if place in seen or trials > MAX_TRIALS:
                continue
            inner_told = complaint({**definitions, **inner})
            if _is_same(told, inner_told):
                pointer, part, told = place, inner, inner_told
                seen.add(place)
                descending = True
                break
    return pointer, told


def _is_same(told: str, inner_told: str) -> bool:
    """What cannot be satisfied inside is told in other words outside."""
    if told.startswith(_UNSATISFIABLE):
        return inner_told.startswith(_UNSATISFIABLE)
    return inner_told == told


def parts_of(schema: Schema, pointer: str, part: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas in one at a place of a whole, and the one that it refers to, with their places."""
    for key in _OF_ONE:
        yield from _schemas((f"{pointer}/{key}", part.get(key)))
    for key in _OF_MANY:
        if isinstance(part.get(key), list):
            yield from _schemas(*((f"{pointer}/{key}/{i}", inner) for i, inner in enumerate(part[key])))
    for key in _OF_NAMED:
        if isinstance(part.get(key), dict):
            yield from _schemas(*((f"{pointer}/{key}/{escaped(name)}", inner) for name, inner in part[key].items()))
    reference = part.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        yield from _schemas((reference, _at(schema, reference)))


def escaped(name: str) -> str:
    """As a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _schemas(*found: tuple[str, Any]) -> Iterator[tuple[str, Schema]]:
    return ((place, inner) for place, inner in found if isinstance(inner, dict))


def _at(schema: Schema, pointer: str) -> Any:
    found: Any = schema
    for name in pointer.split("/")[1:]:
        if isinstance(found, list) and name.isdecimal():
            found = found[int(name)] if int(name) < len(found) else None
        else:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
