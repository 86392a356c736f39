"""Where two settings differ, key by key, and settings with some values of others. Knows no file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from configs.load import key_paths
from configs.schema import ServeSettings


def value_of(settings: ServeSettings, key: str) -> Any:
    """What stands under a dotted key path."""
    found: Any = settings
    for part in key.split("."):
        found = getattr(found, part)
    return found


def changed_keys(one: ServeSettings, other: ServeSettings) -> Iterator[str]:
    """Key paths whose values differ, in order."""
    return (key for key in key_paths(ServeSettings) if value_of(one, key) != value_of(other, key))


def with_values_of(settings: ServeSettings, other: ServeSettings, keys: Iterable[str]) -> ServeSettings:
    """The settings, but for some keys, which have the values that they have in `other`. Raises pydantic's
    ValidationError where these do not go together with the rest."""
    document = settings.model_dump()
    for key in keys:
        *blocks, name = key.split(".")
        block = document
        for part in blocks:
            block = block[part]
        block[name] = value_of(other, key)
    return ServeSettings.model_validate(document)
