"""The base of all settings. Knows no setting."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=0, le=65535)]


class Settings(BaseModel):
    """Base of all settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def as_port(given: object, words: tuple[str, ...]) -> object:
    """A port or one of some words; one line for what is neither, where a union would give one for each of its members.

    Raises ValueError.
    """
    number = int(given) if isinstance(given, str) and given.isascii() and given.isdecimal() else given
    if given in words or (type(number) is int and 0 <= number <= 65535):
        return number
    listed = ", ".join(("a port from 0 to 65535", *words[:-1]))
    raise ValueError(f"give {listed} or {words[-1]}")
