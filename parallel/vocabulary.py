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
    """Per row: the id of the largest logit (the lowest of equals), and that logit. float32, and but where asked for:

    second_R: the second largest logit.
    rest_R: mass of all other tokens, in units of the best one's: its probability is 1 / (1 + rest).
    entropy_R: of the law, in nats. Like the rest it keeps its relative precision where the best token has all but all
        of the mass.
    """

    id_R: Tensor
    top_R: Tensor
    second_R: Tensor | None = None
    rest_R: Tensor | None = None
    entropy_R: Tensor | None = None


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

    def best(
        self, logits_RP: Tensor, *, with_second: bool = False, with_rest: bool = False, with_entropy: bool = False
    ) -> Best | None:
        """The largest logit of each row, on the leader; None elsewhere."""
        if self._group.size == 1:
            return best_of(logits_RP, with_second=with_second, with_rest=with_rest, with_entropy=with_entropy)
        id_R, others_RP = _without_best(logits_RP)
        top_R = logits_RP.gather(-1, id_R[:, None])[:, 0]
        columns = [id_R + self._start, top_R]
        if with_second:
            columns.append(others_RP.amax(-1))
        if with_rest or with_entropy:
            columns += _masses(others_RP, top_R)
        # float64 holds ids and float32 logits exactly, so that one gather brings all.
        gathered = self._group.gather(torch.stack([column.double() for column in columns]))
        if gathered is None:
            return None
        id_GR, top_GR, *found = gathered.unbind(1)
        # The first of equals is the lowest rank, and so the lowest id.
        best_R, winner_1R = top_GR.max(0).values, top_GR.argmax(0, keepdim=True)
        second_R = rest_R = entropy_R = None
        if with_second:
            second_R = top_GR.scatter(0, winner_1R, found.pop(0).gather(0, winner_1R)).amax(0).float()
        if found:
            rest_R, moment_R = _combined(top_GR - best_R, winner_1R, *found)
            entropy_R = _entropy(rest_R, moment_R).float() if with_entropy else None
            rest_R = rest_R.float() if with_rest else None
        return Best(
            id_R=id_GR.gather(0, winner_1R)[0].long(),
            top_R=best_R.float(),
            second_R=second_R,
            rest_R=rest_R,
            entropy_R=entropy_R,
        )


def best_of(
    logits_RV: Tensor, *, with_second: bool = False, with_rest: bool = False, with_entropy: bool = False
) -> Best:
    """The largest logit of each row that holds all columns."""
    id_R, others_RV = _without_best(logits_RV)
    top_R = logits_RV.gather(-1, id_R[:, None])[:, 0]
    rest_R = entropy_R = None
    if with_rest or with_entropy:
        rest_R, moment_R = _masses(others_RV, top_R)
        entropy_R = _entropy(rest_R, moment_R) if with_entropy else None
    return Best(
        id_R=id_R,
        top_R=top_R,
        second_R=others_RV.amax(-1) if with_second else None,
        rest_R=rest_R if with_rest else None,
        entropy_R=entropy_R,
    )


def _without_best(logits_RP: Tensor) -> tuple[Tensor, Tensor]:
    """The best column, and the row with −inf in its place."""
    id_R = logits_RP.argmax(-1)
    return id_R, logits_RP.scatter(-1, id_R[:, None], float("-inf"))


def _masses(others_RP: Tensor, top_R: Tensor) -> tuple[Tensor, Tensor]:
    """Σ exp(d) and Σ exp(d) · d with d = logit − top. Without the best column, whose 1 would drown a small rest."""
    below_RP = others_RP - top_R[:, None]
    mass_RP = below_RP.exp()
    return mass_RP.sum(-1), (mass_RP * below_RP.masked_fill(below_RP == float("-inf"), 0.0)).sum(-1)


def _combined(below_GR: Tensor, winner_1R: Tensor, rest_GR: Tensor, moment_GR: Tensor) -> tuple[Tensor, Tensor]:
    """`_masses` of whole rows from those of the parts, whose best columns lie `below` the best of all, float64. Of a
    part that did not win, the best column is one of the others."""
    mass_GR = rest_GR + torch.ones_like(rest_GR).scatter(0, winner_1R, 0.0)
    moment_GR = moment_GR + below_GR * mass_GR
    scale_GR = below_GR.exp()
    is_empty_GR = below_GR == float("-inf")  # nothing but padding and forbidden tokens
    rest_R = (scale_GR * mass_GR).masked_fill(is_empty_GR, 0.0).sum(0)
    return rest_R, (scale_GR * moment_GR).masked_fill(is_empty_GR, 0.0).sum(0)


def _entropy(rest_R: Tensor, moment_R: Tensor) -> Tensor:
    """−Σ p log p, a sum of two terms that are both positive."""
    return rest_R.log1p() - moment_R / (1 + rest_R)
