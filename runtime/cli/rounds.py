"""Rounds of speculation as marked text: what was drafted, what stood, what the target put instead. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.text import Text

from runtime.request import Round

ACCEPTED = "green"
REJECTED = "dim red strike"
OWN = "bold yellow"

Spell = Callable[[int], str]
"""Text of one token id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What stands before and after rejected drafts, and before and after a token of the target's own."""

    rejected: tuple[str, str]
    own: tuple[str, str]


COLOURS = Marks(rejected=("", ""), own=("", ""))
"""The styles tell all."""
SIGNS = Marks(rejected=("[-", "-]"), own=("{", "}"))
"""For output without colour."""


def legend(marks: Marks) -> Text:
    """Explains the colours or the signs."""
    return Text.assemble(
        ("accepted draft", ACCEPTED),
        "  ",
        ("rejected draft".join(marks.rejected), REJECTED),
        "  ",
        ("target's own token: replacement or bonus".join(marks.own), OWN),
    )


def paint(rounds: Iterable[Round], spell: Spell, marks: Marks) -> Text:
    """The rounds' tokens in order; rejected drafts stand, struck through, before the token that replaced them.

    Without the rejected ones and the marks the text is the emitted one. Line ends inside rejected drafts show as a
    sign, so that they break no line.
    """
    text = Text(no_wrap=False, end="")
    for round_ in rounds:
        for token in round_.emitted[: round_.accepted]:
            text.append(spell(token), ACCEPTED)
        # A round cut short by a stop or a limit ended inside its accepted run: what came after was not rejected by
        # the target in the reader's sense, it was never reached.
        rejected = round_.drafted[round_.accepted :] if len(round_.emitted) > round_.accepted else ()
        if rejected:
            spelled = "".join(map(spell, rejected)).replace("\n", "⏎")
            text.append(spelled.join(marks.rejected), REJECTED)
        for token in round_.emitted[round_.accepted :]:
            text.append(spell(token).join(marks.own), OWN)
    return text
