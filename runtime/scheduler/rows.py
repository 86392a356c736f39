"""How the token rows of one step are shared between decodes and prompt chunks. Pure arithmetic on counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.plan import VERIFY_EVERYTHING

PREFILL_SHARE = 4
"""While prompts wait, decodes leave one in this many rows to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShares:
    """num_decodes: how many of the decodes run, from the front. chunks: prompt rows per prefill, from the front."""

    num_decodes: int
    chunks: tuple[int, ...]


def share_rows(
    waiting_drafts: Sequence[int], prompt_rows: Sequence[int], max_rows: int, *, verify_budget: int = VERIFY_EVERYTHING
) -> RowShares:
    """Fills a step of at most `max_rows` token rows.

    waiting_drafts: per decoding sequence, the longest unserved first. prompt_rows: prompt tokens each prefilling
    sequence has left, the longest admitted first. verify_budget: draft rows of all of them together, at most; which
    drafts those are is not known here, so that any number of decodes has rows for one token each and for the budget.

    Decodes come first: every running stream moves each step as long as all fit. Where they do not, those at the back go
    without, and the caller puts them to the front of the next step. While a prompt waits, decodes leave a quarter of
    the rows to it (or what the prompts need, if that is less), so neither side starves. Requires that the widest decode
    and one prompt row fit together.
    """
    left_for_decodes = max_rows
    if prompt_rows:
        widest = 1 + min(max(waiting_drafts), verify_budget) if waiting_drafts else 0
        assert widest < max_rows, f"a decode of {widest} rows leaves no prompt row in a step of {max_rows}"
        reserve = max(1, min(max_rows // PREFILL_SHARE, max_rows - widest))
        left_for_decodes -= min(reserve, sum(prompt_rows))
    num_decodes = used = num_drafts = 0
    for drafts in waiting_drafts:
        if num_decodes + 1 + min(num_drafts + drafts, verify_budget) > left_for_decodes:
            break
        num_drafts += drafts
        num_decodes += 1
        used = num_decodes + min(num_drafts, verify_budget)
    chunks = []
    for rows in prompt_rows:
        if used == max_rows:
            break
        chunks.append(min(rows, max_rows - used))
        used += chunks[-1]
    return RowShares(num_decodes=num_decodes, chunks=tuple(chunks))
