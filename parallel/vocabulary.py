"""Embedding table and output head cut over the vocabulary: a rank holds some rows of each. Knows no model.

    embed    each rank looks up the ids it has, zeros elsewhere, summed
    greedy   each rank finds its own best column; only those are gathered, by the rank that decides
    full     all columns, gathered by the rank that decides: for sampling, which needs the whole law

Shape letters: N rows, R rows of logits, D hidden, V vocabulary, P columns held here (padding included).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel import slices
from parallel.collectives import Group
from parallel.slices import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """Per row: the id of the largest logit (the lowest of equals), that logit, the second largest, and the logarithm of
    the mass of all. float32, the last two where they were asked for."""

    id_R: Tensor
    top_R: Tensor
    second_R: Tensor | None
    log_mass_R: Tensor | None


class Vocabulary:
    """`count` tokens, cut over the ranks of `group`."""

    def __init__(self, count: int, group: Group) -> None:
        self._group = group
        self._count = count
        part = slices.vocabulary(count, Shard(group.rank, group.size))
        self._start, self._held = part.rows.start, part.rows.length
        self._has_padding = part.padding > 0

    def embed(self, ids_N: Tensor, table_PD: Tensor) -> Tensor:
        """Rows of the whole table, [N, D], on every rank."""
        if self._group.size == 1:
            return F.embedding(ids_N, table_PD)
        local_N = ids_N - self._start
        held_N = (local_N >= 0) & (local_N < self._held)
        rows_ND = F.embedding(local_N * held_N, table_PD)
        return self._group.all_reduce(rows_ND.masked_fill_(~held_N[:, None], 0))

    def without_padding(self, logits_RP: Tensor) -> Tensor:
        """−inf where a column is no token; in place."""
        if self._has_padding:
            logits_RP[:, self._held :] = float("-inf")
        return logits_RP

    def gather(self, logits_RP: Tensor) -> Tensor | None:
        """All columns [R, V], on the leader; None elsewhere."""
        if self._group.size == 1:
            return logits_RP
        parts = self._group.gather(logits_RP)
        return None if parts is None else parts.transpose(0, 1).flatten(1)[:, : self._count].contiguous()

    def best(self, logits_RP: Tensor, *, with_second: bool = False, with_mass: bool = False) -> Best | None:
        """The largest logit of each row, on the leader; None elsewhere."""
        mine = _best_of(logits_RP, with_second=with_second, with_mass=with_mass)
        if self._group.size == 1:
            return mine
        # float64 holds ids and float32 logits exactly, so that one gather brings all.
        columns = [mine.id_R + self._start, mine.top_R, mine.second_R, mine.log_mass_R]
        gathered = self._group.gather(torch.stack([c.double() for c in columns if c is not None]))
        if gathered is None:
            return None
        id_GR, top_GR, *others = gathered.unbind(1)
        # The first of equals is the lowest rank, and so the lowest id.
        top_R, winner_1R = top_GR.max(0).values, top_GR.argmax(0, keepdim=True)
        second_R = log_mass_R = None
        if with_second:
            runners_up_GR = top_GR.scatter(0, winner_1R, others.pop(0).gather(0, winner_1R))
            second_R = runners_up_GR.amax(0).float()
        if with_mass:
            log_mass_R = others.pop(0).logsumexp(0).float()
        return Best(
            id_R=id_GR.gather(0, winner_1R)[0].long(), top_R=top_R.float(), second_R=second_R, log_mass_R=log_mass_R
        )


def _best_of(logits_RP: Tensor, *, with_second: bool, with_mass: bool) -> Best:
    id_R = logits_RP.argmax(-1)
    return Best(
        id_R=id_R,
        top_R=logits_RP.gather(-1, id_R[:, None])[:, 0],
        second_R=logits_RP.topk(2).values[:, 1] if with_second else None,
        log_mass_R=logits_RP.logsumexp(-1) if with_mass else None,
    )
