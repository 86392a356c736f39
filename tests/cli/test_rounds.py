"""Colours of drafted, accepted, rejected and own tokens."""

from __future__ import annotations

from rich.text import Text

from runtime.cli.rounds import ACCEPTED, OWN, REJECTED, legend, paint
from runtime.request import Round


def spell(token: int) -> str:
    return chr(token)


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def spans(text: Text) -> list[tuple[str, str]]:
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def test_a_rejected_draft_stands_before_the_token_that_replaced_it():
    painted = paint([Round(drafted=ids("abcd"), accepted=2, emitted=ids("abX"))], spell)
    assert spans(painted) == [("a", ACCEPTED), ("b", ACCEPTED), ("c", REJECTED), ("d", REJECTED), ("X", OWN)]


def test_the_bonus_token_follows_a_run_that_stood():
    assert spans(paint([Round(drafted=ids("ab"), accepted=2, emitted=ids("abX"))], spell)) == [
        ("a", ACCEPTED),
        ("b", ACCEPTED),
        ("X", OWN),
    ]


def test_a_run_cut_by_a_stop_shows_no_rejected_drafts():
    assert spans(paint([Round(drafted=ids("abcd"), accepted=3, emitted=ids("ab"))], spell)) == [
        ("a", ACCEPTED),
        ("b", ACCEPTED),
    ]


def test_without_the_rejected_drafts_the_text_is_the_emitted_one():
    rounds = [
        Round(drafted=(), accepted=0, emitted=ids("h")),
        Round(drafted=ids("ex\n"), accepted=1, emitted=ids("el")),
        Round(drafted=ids("lo"), accepted=2, emitted=ids("lo\n")),
    ]
    painted = paint(rounds, spell)
    assert "".join(piece for piece, style in spans(painted) if style != REJECTED) == "hello\n"
    # A line end that was never emitted breaks no line.
    assert painted.plain.count("\n") == 1


def test_markup_in_a_token_is_text():
    assert paint([Round(drafted=(), accepted=0, emitted=(1,))], lambda token: "[red]").plain == "[red]"


def test_the_legend_uses_the_very_styles():
    assert {style for _, style in spans(legend())} == {ACCEPTED, REJECTED, OWN}
