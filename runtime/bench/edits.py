"""Predictions of the edited-file case whose distance from the output is known. Pure; knows no server.

A small model follows no instruction to edit a file, so the case is made from its end: what the model says is the new
file, and the old one, which is sent as the prediction, is made of it by edits at a stated rate.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain

MAX_SPAN = 4
"""Tokens of an edit: one to so many."""
MAX_MOVE = 8
"""Tokens that a moved span is moved by: one to so many."""


def predictions_of(outputs: Sequence[Sequence[int]], every: int, seed: int) -> list[tuple[int, ...]]:
    """A prediction of each output: the same for the same seed and output, whatever the others' number."""
    vocabulary = sorted({*chain.from_iterable(outputs)})
    return [
        edited(output, every, vocabulary, random.Random(f"edits/{seed}/{number}"))
        for number, output in enumerate(outputs)
    ]


def edited(output: Sequence[int], every: int, vocabulary: Sequence[int], source: random.Random) -> tuple[int, ...]:
    """The output with an edit behind every `every` tokens of it on average, 1 to 2 · every − 1 evenly; none for 0.

    An edit replaces or deletes a span, inserts one, or moves one further on, each as often; new tokens are drawn from
    `vocabulary`. The first token stays.
    """
    if not every:
        return tuple(output)
    tokens: list[int] = []
    position = 0
    while True:
        end = position + source.randint(1, 2 * every - 1)
        tokens += output[position:end]
        if end >= len(output):
            return tuple(tokens)
        position = end + _edit(tokens, output[end:], vocabulary, source)


def _edit(tokens: list[int], rest: Sequence[int], vocabulary: Sequence[int], source: random.Random) -> int:
    """Appends what stands in the place of the first tokens of `rest`, and returns how many those are."""
    span = source.randint(1, MAX_SPAN)
    match source.choice(("replace", "insert", "delete", "move")):
        case "replace":
            tokens += source.choices(vocabulary, k=span)
            return span
        case "insert":
            tokens += source.choices(vocabulary, k=span)
            return 0
        case "delete":
            return span
        case _:
            place = span + source.randint(1, MAX_MOVE)
            tokens += [*rest[span:place], *rest[:span]]
            return place
