"""Drafts that are looked up rather than computed: in a prediction of the output, or in what the sequence has already.

    prediction   a text that the output may have much in common with. An anchor, the token expected next, goes along it
                 while the output agrees. Where the output leaves it, as an edited file does, the anchor is put down
                 again behind the longest run of last tokens that the prediction holds: at the nearest such place from
                 the old anchor on, or else at the nearest one before it. Until then nothing is proposed.
    ngram        the longest run of last tokens that prompt and output hold earlier, at its most recent place. What
                 follows there is proposed; where that reaches the end, it goes on with itself, as what repeats does.

How many of the last tokens are looked for: LENGTHS. A prediction goes before an ngram. A token is proposed while it is
likelier than not to stand, by how often such tokens did in this sequence, proposed or not.

Everything is a function of the committed tokens alone, whatever rounds they came in: so these drafts are point masses,
and their chances are known before them. A token costs the same however much came before; only the index of a prompt or
prediction takes time that grows with it, once. Knows no rank, no tensor and no draft of others.

Grams, which are runs of n tokens, are told apart by 64-bit hashes. Two of one hash would cost a bad guess, no more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.plan import Origin

LENGTHS = (6, 3, 2)
"""How many of the last tokens are looked for, the longest first."""
LEAST_CHANCE = 0.5
"""Of a token that is proposed: where it is less, the drafter's head mostly does better."""
PRIOR_WEIGHT = 4.0
"""Tokens that what is expected beforehand counts for."""
WINDOW = 32.0
"""Tokens after which one counts half."""
PREDICTION_CHANCES = (0.7, 0.8, 0.9)
"""Beforehand, by how many tokens agreed just before: fewer than 3, fewer than 6, more."""
NGRAM_CHANCES = (0.5, 0.6, 0.8)

_DEPTHS = tuple(sorted(LENGTHS))[1:]
_BASE = 0x9E3779B97F4A7C15
_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Guess:
    """tokens: what may come next, in order. chances: with which each stands where those before it do, above 0 and
    below 1."""

    origin: Origin
    tokens: tuple[int, ...]
    chances: tuple[float, ...]


NO_GUESS = Guess(Origin.DRAFTER, (), ())


class Chances:
    """How often expected tokens came, by how many had agreed before. prior: as PREDICTION_CHANCES."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = prior
        self._came, self._expected = [0.0] * len(prior), [0.0] * len(prior)

    def note(self, depth: int, came: bool) -> None:
        place = bisect_right(_DEPTHS, depth)
        decay = 0.5 ** (1 / WINDOW)
        self._came[place] = self._came[place] * decay + came
        self._expected[place] = self._expected[place] * decay + 1

    def of(self, depth: int) -> float:
        """Of the token behind `depth` that agreed."""
        place = bisect_right(_DEPTHS, depth)
        return (self._came[place] + PRIOR_WEIGHT * self._prior[place]) / (self._expected[place] + PRIOR_WEIGHT)


class Grams:
    """Where each gram of a text is, if something follows it. Takes n log n for n tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        tokens_N = np.array(tokens, dtype=np.uint64) + np.uint64(1)
        self._of_length = {length: _sorted_grams(tokens_N, length) for length in LENGTHS}

    def places(self, length: int, key: int) -> NDArray[np.int64]:
        """Indices of what follows the occurrences of a gram, ascending."""
        keys, ends = self._of_length[length]
        wanted = np.uint64(key)
        return ends[np.searchsorted(keys, wanted, "left") : np.searchsorted(keys, wanted, "right")]


class Text:
    """The prompt, and behind it what was committed."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = prompt
        self._output: list[int] = []

    def __len__(self) -> int:
        return len(self.prompt) + len(self._output)

    def __getitem__(self, index: int) -> int:
        """index: 0 or more."""
        from_output = index - len(self.prompt)
        return self.prompt[index] if from_output < 0 else self._output[from_output]

    def append(self, token: int) -> None:
        self._output.append(token)

    def last_grams(self) -> list[tuple[int, int]]:
        """Those that the text ends with, as lengths and keys, the longest first."""
        found, key, factor, size = [], 0, 1, len(self)
        for back in range(1, min(LENGTHS[0], size) + 1):
            key = (key + (self[size - back] + 1) * factor) & _BITS
            factor = factor * _BASE & _BITS
            if back in LENGTHS:
                found.append((back, key))
        return found[::-1]


class PredictionLookup:
    """See the module. anchor: index of the token that is expected next; None where none is."""

    origin = Origin.PREDICTION

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self.anchor: int | None = 0 if tokens else None
        self._old = 0
        # How many tokens before the anchor agree.
        self._depth = 0
        self._chances = Chances(PREDICTION_CHANCES)

    @cached_property
    def _grams(self) -> Grams:
        """Made when the output leaves the prediction for the first time."""
        return Grams(self._tokens)

    def advance(self, text: Text) -> None:
        """Takes note of the token that `text` ends with, after a call for each one before."""
        if self.anchor is not None:
            came = self._tokens[self.anchor] == text[len(text) - 1]
            self._chances.note(self._depth, came)
            self._old = self.anchor + came
            self._depth += 1
            self.anchor = self._old if came and self._old < len(self._tokens) else None
        if self.anchor is None:
            self._put_down(text)

    def expected(self) -> Iterator[tuple[int, float]]:
        """What comes next and its chance, as far as is known."""
        if self.anchor is not None:
            for ahead, place in enumerate(range(self.anchor, len(self._tokens))):
                yield self._tokens[place], self._chances.of(self._depth + ahead)

    def _put_down(self, text: Text) -> None:
        for length, key in text.last_grams():
            places = self._grams.places(length, key)
            if len(places):
                behind = int(np.searchsorted(places, self._old, "left"))
                self.anchor, self._depth = int(places[min(behind, len(places) - 1)]), length
                return


class NgramLookup:
    """See the module."""

    origin = Origin.NGRAM

    def __init__(self, text: Text) -> None:
        """text: with nothing but its prompt yet."""
        self._text = text
        # Index of what follows the newest occurrence of a gram, of those that end behind the prompt or at its end.
        self._newest: dict[tuple[int, int], int] = {}
        self._pending = text.last_grams()
        self._place: int | None = None
        self._depth = 0
        self._chances = Chances(NGRAM_CHANCES)

    @cached_property
    def _in_prompt(self) -> Grams:
        return Grams(self._text.prompt)

    def advance(self, text: Text) -> None:
        """Takes note of the token that `text` ends with, after a call for each one before."""
        newest = len(text) - 1
        if self._place is not None:
            self._chances.note(self._depth, text[self._place] == text[newest])
        # The last grams have something behind them now.
        self._newest.update(dict.fromkeys(self._pending, newest))
        self._pending, self._place = text.last_grams(), None
        for gram in self._pending:
            if (place := self._find(gram)) is not None:
                self._place, self._depth = place, gram[0]
                return

    def expected(self) -> Iterator[tuple[int, float]]:
        """What comes next and its chance, for ever where anything is known."""
        if self._place is None:
            return
        told: list[int] = []
        while True:
            beyond = self._place + len(told) - len(self._text)
            token = told[beyond] if beyond >= 0 else self._text[len(self._text) + beyond]
            yield token, self._chances.of(self._depth + len(told))
            told.append(token)

    def _find(self, gram: tuple[int, int]) -> int | None:
        place = self._newest.get(gram)
        if place is not None:
            return place
        places = self._in_prompt.places(*gram)
        return int(places[-1]) if len(places) else None


class Lookup:
    """Both, for one sequence."""

    def __init__(self, prompt: Sequence[int], prediction: Sequence[int], *, looks_back: bool) -> None:
        self._text = Text(prompt)
        self._kinds: list[PredictionLookup | NgramLookup] = []
        if prediction:
            self._kinds.append(PredictionLookup(prediction))
        if looks_back:
            self._kinds.append(NgramLookup(self._text))

    def __len__(self) -> int:
        """Tokens that are known: the prompt, and what was committed since."""
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens were committed."""
        for token in tokens:
            self._text.append(token)
            for kind in self._kinds:
                kind.advance(self._text)

    def guess(self, limit: int) -> Guess:
        """The tokens to come, `limit` at most; of one kind."""
        for kind in self._kinds:
            tokens: list[int] = []
            chances: list[float] = []
            for _, (token, chance) in zip(range(limit), kind.expected(), strict=False):
                if chance < LEAST_CHANCE:
                    break
                tokens.append(token)
                chances.append(chance)
            if tokens:
                return Guess(kind.origin, tuple(tokens), tuple(chances))
        return NO_GUESS


def _sorted_grams(tokens_N: NDArray[np.uint64], length: int) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    """Keys ascending, and the index behind each gram, ascending among equal keys. The same hash as `last_grams`."""
    count = max(0, len(tokens_N) - length)
    keys = np.zeros(count, dtype=np.uint64)
    for offset in range(length):
        keys = keys * np.uint64(_BASE) + tokens_N[offset : offset + count]
    order = np.argsort(keys, kind="stable")
    return keys[order], order + length
