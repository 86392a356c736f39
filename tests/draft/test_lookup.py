"""Lookups against a reader who goes over everything at each token, on edited files, and by what a token costs."""

from __future__ import annotations

import inspect
import itertools
import math
import random
import re
import sys
import textwrap
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.draft import lookup as lookup_module
from workers.draft.lookup import (
    LEAST_CHANCE,
    LENGTHS,
    NGRAM_CHANCES,
    PREDICTION_CHANCES,
    WINDOW,
    Chances,
    Lookup,
    NgramLookup,
    PredictionLookup,
    Text,
)
from workers.plan import Origin

GAMMA = 4
TEXTS = st.lists(st.integers(0, 3), max_size=40)
FILE = list(range(100, 400))
NEW = list(range(1000, 1020))


def followed(text: list[int], tail: list[int], length: int) -> list[int]:
    """Indices of what follows the last `length` tokens of `tail` in `text`."""
    if len(tail) < length:
        return []
    return [i + length for i in range(len(text) - length) if text[i : i + length] == tail[-length:]]


def anchor_by_reading(prompt: list[int], prediction: list[int], output: list[int]) -> int | None:
    anchor, old = (0 if prediction else None), 0
    for end, token in enumerate(output, start=1):
        if anchor is not None:
            agrees = prediction[anchor] == token
            old = anchor + agrees
            anchor = old if agrees and old < len(prediction) else None
        if anchor is None:
            found = (followed(prediction, prompt + output[:end], length) for length in LENGTHS)
            places = next(filter(None, found), [])
            behind = [place for place in places if place >= old]
            anchor = min(behind) if behind else max(places, default=None)
    return anchor


@given(TEXTS, TEXTS, TEXTS)
def test_the_anchor_is_where_a_reader_puts_it(prompt: list[int], prediction: list[int], output: list[int]) -> None:
    text, found = Text(prompt), PredictionLookup(prediction)
    for end, token in enumerate(output, start=1):
        text.append(token)
        if prediction:
            found.advance(text)
        assert found.anchor == anchor_by_reading(prompt, prediction, output[:end])
    told = [token for token, _ in found.expected()]
    assert told == ([] if found.anchor is None else prediction[found.anchor :])


@given(TEXTS, TEXTS)
def test_an_ngram_goes_on_as_its_most_recent_place_did(prompt: list[int], output: list[int]) -> None:
    text = Text(prompt)
    found = NgramLookup(text)
    for end, token in enumerate(output, start=1):
        text.append(token)
        found.advance(text)
        whole = prompt + output[:end]
        places = next(filter(None, (followed(whole, whole, length) for length in LENGTHS)), [])
        expected: list[int] = []
        if places:
            for ahead in range(10):
                whole.append(whole[max(places) + ahead])
            expected = whole[-10:]
        assert [token for token, _ in itertools.islice(found.expected(), 10)] == expected


@given(TEXTS, TEXTS, TEXTS, st.lists(st.integers(0, 5)))
def test_a_guess_depends_on_the_tokens_and_not_on_the_rounds_they_came_in(
    prompt: list[int], prediction: list[int], output: list[int], cuts: list[int]
) -> None:
    at_once, in_rounds = (Lookup(prompt, prediction, looks_back=True) for _ in range(2))
    at_once.extend(output)
    rest = list(output)
    for cut in cuts:
        in_rounds.extend(rest[:cut])
        in_rounds.guess(3)
        rest = rest[cut:]
    in_rounds.extend(rest)
    assert len(in_rounds) == len(prompt) + len(output)
    for limit in range(GAMMA + 1):
        guess = in_rounds.guess(limit)
        assert guess == at_once.guess(limit)
        assert len(guess.tokens) == len(guess.chances) <= limit
        assert all(LEAST_CHANCE <= chance < 1 for chance in guess.chances)
        assert (guess.origin is Origin.DRAFTER) == (not guess.tokens)


def decode(lookup: Lookup, output: Sequence[int], gamma: int = GAMMA) -> list[tuple[int, int]]:
    """Rounds of a target that emits `output`: how many were proposed, and how many of these stood."""
    rounds, done = [], 0
    while done < len(output):
        guess = lookup.guess(gamma) if done else lookup_module.NO_GUESS  # the first token is the prefill's
        stood = 0
        while stood < len(guess.tokens) and output[done + stood : done + stood + 1] == [guess.tokens[stood]]:
            stood += 1
        lookup.extend(output[done : done + stood + 1])
        rounds.append((len(guess.tokens), stood))
        done += stood + 1
    return rounds


EDITS: dict[str, tuple[list[int], int, int]] = {
    # The output, how many of its tokens are new, and at how many places it leaves the file.
    "none": (FILE, 0, 0),
    "replaced": (FILE[:100] + NEW[:3] + FILE[103:], 3, 1),
    "replaced by more": (FILE[:100] + NEW + FILE[103:], 20, 1),
    "inserted": (FILE[:150] + NEW[:5] + FILE[150:], 5, 1),
    "deleted": (FILE[:200] + FILE[220:], 0, 1),
    "moved down": (FILE[:50] + FILE[80:200] + FILE[50:80] + FILE[200:], 0, 3),
    "moved up": (FILE[:50] + FILE[180:200] + FILE[50:180] + FILE[200:], 0, 3),
    "first token replaced": (NEW[:1] + FILE[1:], 1, 1),
    "first token deleted": (FILE[1:], 0, 1),
    "put before": (NEW[:6] + FILE, 6, 1),
    "last token replaced": (FILE[:-1] + NEW[:1], 1, 1),
    "gone on with": (FILE + NEW[:6], 6, 0),
    "twice the same": (FILE + FILE, 0, 1),
    "all at once": (NEW[:2] + FILE[3:90] + NEW[2:9] + FILE[90:180] + FILE[200:220] + NEW[9:12] + FILE[223:], 12, 4),
}


@pytest.mark.parametrize(("output", "num_new", "num_places"), EDITS.values(), ids=EDITS.keys())
def test_an_edited_file_is_followed_again_behind_each_edit(output: list[int], num_new: int, num_places: int) -> None:
    """What agrees costs a round per gamma + 1 tokens; an edit its own tokens, and the last ones, by which the place is
    found."""
    rounds = decode(Lookup([1, 2, 3], FILE, looks_back=False), output)
    fewest = math.ceil((len(output) - 1) / (GAMMA + 1)) + 1
    assert len(rounds) <= fewest + num_new + num_places * (LENGTHS[-1] + 1)
    fallen = sum(proposed > stood for proposed, stood in rounds)
    assert fallen <= num_places + (len(output) % (GAMMA + 1) > 0)
    if not num_new + num_places:
        assert len(rounds) == fewest


def test_a_file_full_of_runs_that_repeat_is_followed_as_well() -> None:
    """Source text, word by word: a third of its pairs stand in it more than once."""
    words = re.findall(r"\w+|\s+|[^\w\s]", inspect.getsource(textwrap))
    numbers: dict[str, int] = {}
    source = [numbers.setdefault(word, len(numbers)) for word in words]
    renamed = [10_000 if token == numbers["width"] else token for token in source]
    num_edits = source.count(numbers["width"])
    assert num_edits > 15
    rounds = decode(Lookup([], source, looks_back=False), renamed)
    assert sum(stood for _, stood in rounds) > 0.7 * len(renamed)
    assert len(rounds) < math.ceil(len(renamed) / (GAMMA + 1)) + 5 * num_edits


def test_a_prediction_of_something_else_is_soon_kept_back() -> None:
    rng = random.Random(0)
    prediction, output = ([rng.randrange(4) for _ in range(2000)] for _ in range(2))
    rounds = decode(Lookup([], prediction, looks_back=False), output)
    # Of four tokens one comes by chance; pairs are found all the time, longer runs too.
    assert sum(proposed for proposed, _ in rounds) < 0.1 * len(output)


def test_a_prediction_goes_before_an_ngram_which_speaks_where_that_has_nothing() -> None:
    lookup = Lookup([7, 8, 9, 7, 8], [1, 2, 3], looks_back=True)
    assert (lookup.guess(9).origin, lookup.guess(9).tokens) == (Origin.PREDICTION, (1, 2, 3))
    lookup.extend([1, 2, 3])
    assert lookup.guess(9) == lookup_module.NO_GUESS
    lookup.extend([7, 8, 9])
    assert (lookup.guess(4).origin, lookup.guess(4).tokens) == (Origin.NGRAM, (7, 8, 1, 2))
    silent = Lookup([7, 8, 9, 7, 8], [1, 2, 3], looks_back=False)
    silent.extend([1, 2, 3, 7, 8, 9])
    assert silent.guess(4) == lookup_module.NO_GUESS


@pytest.mark.parametrize("tokens", [[], [5], [5, 6]])
def test_texts_too_short_for_a_gram_are_no_trouble(tokens: list[int]) -> None:
    lookup = Lookup(tokens, tokens, looks_back=True)
    for token in (5, 6, 9, 5):
        lookup.extend([token])
        assert len(lookup.guess(3).tokens) <= 3
    assert lookup.guess(0) == lookup_module.NO_GUESS


@pytest.mark.parametrize("prior", [PREDICTION_CHANCES, NGRAM_CHANCES])
@pytest.mark.parametrize("rate", [0.1, 0.6, 0.95])
def test_chances_go_from_what_is_expected_to_what_was_seen(prior: Sequence[float], rate: float) -> None:
    rng, chances = random.Random(1), Chances(prior)
    assert [chances.of(depth) for depth in (0, LENGTHS[1], LENGTHS[0])] == pytest.approx(list(prior))
    told = []
    for _ in range(4000):
        chances.note(LENGTHS[1], rng.random() < rate)
        told.append(chances.of(LENGTHS[1]))
    assert abs(sum(told[100:]) / len(told[100:]) - rate) < 0.05 + 4 / WINDOW * abs(prior[1] - rate)
    assert all(0 < chance < 1 for chance in told)
    assert chances.of(0) == pytest.approx(prior[0]), "what is seen of long runs says nothing of short ones"


def steps_of(lookup: Lookup, token: int) -> int:
    """Bytecode instructions of the module under test that a token and the guess behind it take."""
    count = 0

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return local

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != lookup_module.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        lookup.extend([token])
        lookup.guess(GAMMA)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("asks", ["prediction", "ngram", "both"])
def test_a_token_costs_the_same_behind_a_long_history(asks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sorts: list[int] = []
    sort = np.argsort
    monkeypatch.setattr(lookup_module.np, "argsort", lambda keys, **how: sorts.append(len(keys)) or sort(keys, **how))
    costs = []
    for size in (200, 50_000):
        rng = random.Random(3)
        prompt, prediction = ([rng.randrange(50) for _ in range(size)] for _ in range(2))
        lookup = Lookup(prompt, prediction if asks != "ngram" else (), looks_back=asks != "prediction")
        lookup.extend([60])  # leaves the prediction at once: whatever is made once is made now
        indexed = len(sorts)
        tokens = [rng.choice((prompt, prediction))[i] for i in range(size // 2, size // 2 + 60)]
        per_token = [steps_of(lookup, token) for token in tokens]
        assert len(sorts) == indexed, "nothing is sorted again"
        costs.append((max(per_token), sum(per_token) / len(per_token)))
    (short_most, short_mean), (long_most, long_mean) = costs
    assert 100 < long_most <= 1.5 * short_most < 3000
    assert long_mean <= 1.5 * short_mean
