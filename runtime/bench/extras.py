"""What requests bring beside their prompts, and which of it cells send. Values alone; knows no server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.load import SettingsError

WITH, WITHOUT, NGRAM = "with", "without", "+ngram"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Role and text of each message; the served checkpoint's chat template makes a prompt of them."""

    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Of one request.

    prediction: text or token ids that its output may have in common with; empty is none. json_schema: what its output
    must be, as JSON; empty is anything. ngram: drafts are looked up in what it has already.
    """

    prediction: str | tuple[int, ...] = ()
    json_schema: str = ""
    ngram: bool = False


NOTHING = Extras()


@dataclass(frozen=True, slots=True)
class Variant:
    """What is sent of that in a cell. brings: predictions and constraints, where prompts have any."""

    brings: bool
    ngram: bool = False

    def __str__(self) -> str:
        return f"{WITH if self.brings else WITHOUT}{NGRAM if self.ngram else ''}"


def parse_variants(texts: Sequence[str]) -> list[Variant]:
    """`with` and `without`, either with `+ngram` behind it, apart or in lists with commas; a repeated one counts once.
    Raises SettingsError."""
    known = {str(variant): variant for variant in (Variant(*pair) for pair in _PAIRS)}
    parts = [part.strip() for text in texts for part in text.split(",")]
    for part in parts:
        if part not in known:
            raise SettingsError(f"--variant {part!r}: choose of {', '.join(known)}")
    return list(dict.fromkeys(known[part] for part in parts))


_PAIRS = ((True, False), (False, False), (True, True), (False, True))
