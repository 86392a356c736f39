"""Advice as a page: every server, every picture it has figures for, and nothing from elsewhere."""

from __future__ import annotations

import re

import pytest
from fakes.advice import ADVICE

from runtime.bench.advice_page import page
from runtime.front.policy_messages import advice_message


def test_each_server_has_its_sentence_and_pictures_and_the_page_needs_nothing_else() -> None:
    text = page([("10.0.0.1:1", "of 17 <b>", advice_message(ADVICE)), ("10.0.0.2:1", "of 3", advice_message(ADVICE))])
    assert (text.count("<svg"), text.count(ADVICE.sentence)) == (4, 2)
    assert "of 17 &lt;b&gt;" in text
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    for words in ("draft 1 (6.2%)", "draft 2 (3.1%)", "by survival", "by formula"):
        assert words in text


@pytest.mark.parametrize("positions", [0, 1])
def test_where_no_confidence_has_come_true_or_not_there_is_no_picture_of_it(positions: int) -> None:
    reply = advice_message(ADVICE)
    del reply.reliability[positions:]
    assert page([("here", "now", reply)]).count("<svg") == 1 + positions
