"""Colours and signs of drafted, accepted, rejected and own tokens."""

from __future__ import annotations

import pytest
from rich.text import Text

from runtime.cli.rounds import ACCEPTED, COLOURS, OWN, REJECTED, SIGNS, legend, paint
from runtime.request import Round


def spell(token: int) -> str:
    return chr(token)


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def spans(text: Text) -> list[tuple[str, str]]:
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def test_a_rejected_draft_stands_before_the_token_that_replaced_it():
    painted = paint([Round(drafted=ids("abcd"), accepted=2, emitted=ids("abX"))], spell, COLOURS)
    assert spans(painted) == [("a", ACCEPTED), ("b", ACCEPTED), ("cd", REJECTED), ("X", OWN)]


def test_the_bonus_token_follows_a_run_that_stood():
    assert spans(paint([Round(drafted=ids("ab"), accepted=2, emitted=ids("abX"))], spell, COLOURS)) == [
        ("a", ACCEPTED),
        ("b", ACCEPTED),
        ("X", OWN),
    ]


def test_a_run_cut_by_a_stop_shows_no_rejected_drafts():
    assert spans(paint([Round(drafted=ids("abcd"), accepted=3, emitted=ids("ab"))], spell, COLOURS)) == [
        ("a", ACCEPTED),
        ("b", ACCEPTED),
    ]


def test_without_the_rejected_drafts_the_text_is_the_emitted_one():
    rounds = [
        Round(drafted=(), accepted=0, emitted=ids("h")),
        Round(drafted=ids("ex\n"), accepted=1, emitted=ids("el")),
        Round(drafted=ids("lo"), accepted=2, emitted=ids("lo\n")),
    ]
    painted = paint(rounds, spell, COLOURS)
    assert "".join(piece for piece, style in spans(painted) if style != REJECTED) == "hello\n"
    # A line end that was never emitted breaks no line.
    assert painted.plain.count("\n") == 1


def test_markup_in_a_token_is_text():
    assert paint([Round(drafted=(), accepted=0, emitted=(1,))], lambda token: "[red]", COLOURS).plain == "[red]"


def test_without_colour_signs_tell_the_rejected_from_the_emitted():
    rounds = [
        Round(drafted=ids("abcd"), accepted=2, emitted=ids("abX")),
        Round(drafted=ids("ef"), accepted=2, emitted=ids("efY")),
        Round(drafted=ids("gh"), accepted=1, emitted=ids("g")),
    ]
    assert paint(rounds, spell, SIGNS).plain == "ab[-cd-]{X}ef{Y}g"


@pytest.mark.parametrize("marks", [COLOURS, SIGNS])
def test_the_legend_uses_the_very_styles_and_signs(marks):
    assert {style for _, style in spans(legend(marks))} == {ACCEPTED, REJECTED, OWN}
    for before, after in (marks.rejected, marks.own):
        assert before in legend(marks).plain
        assert after in legend(marks).plain
