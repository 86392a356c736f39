"""What a check says. Knows no check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """FAILURE: a server with these settings would not start, or not do its work. WARNING: it would, but there is
    something to be done. NOTE: worth knowing. OK: looked at, and well."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """text: what was found. remedy: what to do about it; of failures and warnings never empty."""

    level: Level
    text: str
    remedy: str = ""


def ok(text: str) -> Finding:
    return Finding(Level.OK, text)


def note(text: str) -> Finding:
    return Finding(Level.NOTE, text)


def warning(text: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, text, remedy)


def failure(text: str, remedy: str) -> Finding:
    return Finding(Level.FAILURE, text, remedy)


def split_remedy(text: str) -> Finding:
    """A failure from an error that names its remedy behind the first semicolon, as ours do."""
    what, _, remedy = text.partition("; ")
    return failure(what, remedy or "see above")


def counted(count: int, what: str) -> str:
    """As in 1 rank, 2 ranks."""
    return f"{count} {what}{'s' * (count != 1)}"


def size_text(size_bytes: float) -> str:
    """In the unit that suits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} TiB"
