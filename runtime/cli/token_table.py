"""Tokens of an output as rows to read: where each begins, how likely it was, what else was likely. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from outrider.v1 import types_pb2

Spell = Callable[[int], str]
"""Text of one token id."""


def token_table(
    token_ids: Sequence[int],
    logprobs: Sequence[types_pb2.TokenLogprob],
    offsets: Sequence[int],
    *,
    title: str,
    first: int = 0,
    spell: Spell | None = None,
) -> Table:
    """One row per id. logprobs, offsets: one per id, or none. first: the number of the first id. spell: None shows ids
    alone."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("", justify="right", style="dim")
    columns: list[tuple[str, Iterable[str]]] = [("token", _named(token_ids, spell))]
    if offsets:
        columns.append(("at", map(str, offsets)))
    if logprobs:
        columns.append(("logprob", (f"{one.logprob:.3f}" for one in logprobs)))
        columns.append(("share", (f"{math.exp(one.logprob):.1%}" for one in logprobs)))
        if any(one.top for one in logprobs):
            columns.append(("likeliest", (_alternatives(one, spell) for one in logprobs)))
    for heading, _ in columns:
        table.add_column(heading, justify="left" if heading in ("token", "likeliest") else "right")
    for number, row in enumerate(zip(*(cells for _, cells in columns), strict=True), start=first):
        table.add_row(str(number), *(Text(cell) for cell in row))
    return table


def _alternatives(one: types_pb2.TokenLogprob, spell: Spell | None) -> str:
    names = _named([each.token_id for each in one.top], spell)
    return ", ".join(f"{name} {each.logprob:.3f}" for name, each in zip(names, one.top, strict=True))


def _named(token_ids: Iterable[int], spell: Spell | None) -> list[str]:
    """With quotes around what is spelled, so that spaces show; a number where there is nothing to spell."""
    texts = ((token_id, "" if spell is None else spell(token_id)) for token_id in token_ids)
    return [repr(text) if text else str(token_id) for token_id, text in texts]
