"""Rounds of speculation as coloured text: what was drafted, what stood, what the target put instead. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.text import Text

from runtime.request import Round

ACCEPTED = "green"
REJECTED = "dim red strike"
OWN = "bold yellow"

Spell = Callable[[int], str]
"""Text of one token id."""


def legend() -> Text:
    """Explains the colours."""
    return Text.assemble(
        ("accepted draft", ACCEPTED),
        "  ",
        ("rejected draft", REJECTED),
        "  ",
        ("target's own token: replacement or bonus", OWN),
    )


def paint(rounds: Iterable[Round], spell: Spell) -> Text:
    """The rounds' tokens in order; a rejected draft stands, struck through, before the token that replaced it.

    Without the rejected ones the text is the emitted one. Line ends inside rejected drafts show as a sign, so that they
    break no line.
    """
    text = Text(no_wrap=False, end="")
    for round_ in rounds:
        for token in round_.emitted[: round_.accepted]:
            text.append(spell(token), ACCEPTED)
        # A round cut short by a stop or a limit ended inside its accepted run: what came after was not rejected by
        # the target in the reader's sense, it was never reached.
        if len(round_.emitted) > round_.accepted:
            for token in round_.drafted[round_.accepted :]:
                text.append(spell(token).replace("\n", "⏎"), REJECTED)
        for token in round_.emitted[round_.accepted :]:
            text.append(spell(token), OWN)
    return text
