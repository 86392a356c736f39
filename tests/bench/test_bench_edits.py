"""Predictions made of recorded outputs: which edits there are, how often, and that a seed tells them."""

from __future__ import annotations

import random
from difflib import SequenceMatcher

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.bench.edits import MAX_MOVE, MAX_SPAN, edited, predictions_of

OUTPUT = tuple(range(100, 120))


class Scripted(random.Random):
    """Draws what it is told: lengths in order, and one kind of edit always. New tokens are 7."""

    def __init__(self, kind: str, *lengths: int) -> None:
        super().__init__()
        self.kind, self.lengths = kind, list(lengths)

    def choice(self, kinds):
        assert self.kind in kinds
        return self.kind

    def randint(self, least, most):
        # Past the script: farther than the output goes.
        return self.lengths.pop(0) if self.lengths else 1000

    def choices(self, vocabulary, *, k):
        return [7] * k


@pytest.mark.parametrize(
    ("kind", "lengths", "middle"),
    [
        ("replace", (5, 3), (7, 7, 7, *OUTPUT[8:])),
        ("insert", (5, 2), (7, 7, *OUTPUT[5:])),
        ("delete", (5, 4), OUTPUT[9:]),
        ("move", (5, 2, 3), (*OUTPUT[7:10], *OUTPUT[5:7], *OUTPUT[10:])),
        ("move", (5, 2, 100), (*OUTPUT[7:], *OUTPUT[5:7])),
        ("replace", (19, 4), (*OUTPUT[5:19], 7, 7, 7, 7)),
        ("delete", (19, 4), OUTPUT[5:19]),
        ("insert", (20,), OUTPUT[5:]),
    ],
)
def test_a_span_is_replaced_inserted_deleted_or_moved_behind_the_stretch_that_stays(kind, lengths, middle):
    assert edited(OUTPUT, 5, [7], Scripted(kind, *lengths)) == (*OUTPUT[:5], *middle)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200), st.integers(0, 40), st.integers(0, 2**62))
def test_a_prediction_begins_as_the_output_and_holds_no_token_that_no_output_has(output, every, seed):
    [prediction] = predictions_of([output], every, seed)
    assert [prediction] == predictions_of([output], every, seed)
    assert prediction[0] == output[0]
    assert {*prediction} <= {*output}
    if not every:
        assert prediction == tuple(output)


def test_edits_come_at_the_rate_and_differ_by_prompt_and_seed():
    output = tuple(range(6000))
    for every in (8, 32):
        [prediction] = predictions_of([output], every, seed=1)
        matcher = SequenceMatcher(None, output, prediction, autojunk=False)
        kept = sum(size for _, _, size in matcher.get_matching_blocks())
        # An edit changes 2.5 tokens on average where it replaces or deletes, and up to that where it moves.
        lost = (len(output) - kept) / (len(output) / (every + (1 + MAX_SPAN) / 2))
        assert 1.0 < lost < MAX_SPAN
        assert abs(len(prediction) - len(output)) < len(output) / every
    assert MAX_MOVE >= MAX_SPAN
    twice = predictions_of([output[:500]] * 2, 8, seed=1)
    assert twice[0] != twice[1]
    assert predictions_of([output[:500]], 8, seed=1) == twice[:1] != predictions_of([output[:500]], 8, seed=2)
