"""How the token rows of one step are shared between decodes and prompt chunks. Pure arithmetic on counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PREFILL_SHARE = 4
"""While prompts wait, decodes leave one in this many rows to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShares:
    """num_decodes: how many of the decodes run, from the front. chunks: prompt rows per prefill, from the front."""

    num_decodes: int
    chunks: tuple[int, ...]


def share_rows(decode_rows: Sequence[int], prompt_rows: Sequence[int], max_rows: int) -> RowShares:
    """Fills a step of at most `max_rows` token rows.

    decode_rows: rows each decoding sequence needs (newest token + waiting drafts), the longest unserved first.
    prompt_rows: prompt tokens each prefilling sequence has left, the longest admitted first.

    Decodes come first: every running stream moves each step as long as all fit. Where they do not, those at the back go
    without, and the caller puts them to the front of the next step. While a prompt waits, decodes leave a quarter of
    the rows to it (or what the prompts need, if that is less), so neither side starves. Requires that the widest decode
    and one prompt row fit together.
    """
    left_for_decodes = max_rows
    if prompt_rows:
        widest = max(decode_rows, default=0)
        assert widest < max_rows, f"a decode of {widest} rows leaves no prompt row in a step of {max_rows}"
        reserve = max(1, min(max_rows // PREFILL_SHARE, max_rows - widest))
        left_for_decodes -= min(reserve, sum(prompt_rows))
    num_decodes = used = 0
    for rows in decode_rows:
        if used + rows > left_for_decodes:
            break
        used += rows
        num_decodes += 1
    chunks = []
    for rows in prompt_rows:
        if used == max_rows:
            break
        chunks.append(min(rows, max_rows - used))
        used += chunks[-1]
    return RowShares(num_decodes=num_decodes, chunks=tuple(chunks))
