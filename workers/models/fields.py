"""Typed reads from the JSON files of a checkpoint; every complaint names file, field and remedy. Knows no model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from workers.plan import LoadError

T = TypeVar("T")


def read_json(path: Path) -> Mapping[str, object]:
    """The JSON object in a file of a checkpoint. Raises LoadError, naming the file."""
    if not path.parent.is_dir():
        raise LoadError(f"{path.parent} is not a directory; set model.path to a checkpoint directory")
    if not path.is_file():
        raise LoadError(f"{path} is missing; model.path must be a checkpoint directory in Hugging Face format")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise LoadError(f"{path} holds a {type(values).__name__}; a JSON object is needed")
    return values


class Fields:
    """One JSON object. A field that is absent or null takes its default, if it has one; a `maybe_` read gives None.

    Every read raises LoadError for a value of another type or out of range.
    """

    def __init__(self, source: Path | str, values: Mapping[str, object]) -> None:
        self._source = source
        self._values = values

    def error(self, name: str, remedy: str) -> LoadError:
        if name not in self._values:
            return LoadError(f"{self._source}: {name} is missing; {remedy}")
        return LoadError(f"{self._source}: {name} is {json.dumps(self._values[name])}; {remedy}")

    def get(self, name: str) -> object:
        return self._values.get(name)

    def maybe_number(self, name: str, *, minimum: float = 0.0, maximum: float = math.inf) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "it must be a number")
        if not minimum <= value <= maximum:
            raise self.error(name, f"it must be between {minimum} and {maximum}")
        return float(value)

    def maybe_integer(self, name: str, *, minimum: int = 1, maximum: int | None = None) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "it must be an integer")
        if value < minimum:
            raise self.error(name, f"it must be at least {minimum}")
        if maximum is not None and value > maximum:
            raise self.error(name, f"it must be at most {maximum}")
        return value

    def number(self, name: str) -> float:
        return self._or_default(name, self.maybe_number(name), None)

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int | None = None) -> int:
        return self._or_default(name, self.maybe_integer(name, minimum=minimum, maximum=maximum), default)

    def multiple(self, name: str, divisor: str) -> int:
        """An integer that another field divides."""
        value = self.integer(name)
        if value % self.integer(divisor):
            raise self.error(name, f"it must be a multiple of {divisor}, which is {self.integer(divisor)}")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "it must be true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers; one integer is a list of one, an absent field an empty list."""
        value = self.get(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise self.error(name, "it must be an integer or a list of integers")
        return tuple(values)

    def choice(self, name: str, served: tuple[str, ...], default: str | None = None) -> str:
        value = self._or_default(name, self.get(name), default)
        if not isinstance(value, str) or value not in served:
            raise self.error(name, f"served: {', '.join(served)}")
        return value

    def table(self, name: str) -> Fields:
        """The fields of a nested object; none where it is absent."""
        value = self.get(name)
        if value is None:
            return Fields(f"{self._source}: {name}", {})
        if not isinstance(value, dict):
            raise self.error(name, "it must be an object")
        return Fields(f"{self._source}: {name}", value)

    def _or_default(self, name: str, value: T | None, default: T | None) -> T:
        if value is not None:
            return value
        if default is None:
            raise self.error(name, "it must be set")
        return default
