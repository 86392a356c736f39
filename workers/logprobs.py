"""How likely the target held tokens by its own logits, before any processing: those that a step emits, and those of
prompts as their chunks pass by. Knows no laws, no noise and no verification.

    emitted tokens    the logits of their laws are there already; rows of the sequences that want it are looked at
    prompt tokens     row p of a chunk has the law of prompt token p + 1; logits are made of them, some rows at a time

The last row of a prompt draws the first token of the output instead, so a column has num_known − samples such rows. All
ranks that share it know that from the plan, and so they gather logits equally often.

Shapes: R, N rows, V vocabulary, K likeliest tokens, X = 2 + 2 K.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.batch import Batch
from workers.demands import TokenLogprob
from workers.loading import Rank
from workers.plan import BatchPlan
from workers.rows import pad_rows

BLOCK = 64
"""Rows at a time: whole rows of logits, and of what is made of them, are large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Tokens of some columns of a batch, a run of each after that of the one before.

    columns: of the plan. counts: tokens of each. widths: how many likeliest tokens each is told of, K of them at most.
    told_NX: as `score` gives them.
    """

    columns: Sequence[int]
    counts: Sequence[int]
    widths: Sequence[int]
    told_NX: Tensor

    def read(self) -> dict[int, tuple[TokenLogprob, ...]]:
        """By column. Reads the device."""
        rows = iter(self.told_NX.tolist())
        return {
            column: tuple(_token(next(rows), width) for _ in range(count))
            for column, count, width in zip(self.columns, self.counts, self.widths, strict=True)
        }


def _token(row: Sequence[float], width: int) -> TokenLogprob:
    token, logprob, *top = row
    ids, logprobs = top[: len(top) // 2], top[len(top) // 2 :]
    pairs = zip(map(int, ids[:width]), logprobs[:width], strict=True)
    return TokenLogprob(token=int(token), logprob=logprob, top=tuple(pairs))


def score(logits_RV: Tensor, token_R: Tensor, num_top: int) -> Tensor:
    """Of each row: a token, its log-probability, the ids of the `num_top` likeliest tokens in order, theirs. As float64
    [R, X], which holds ids and float32 values exactly, so that one read brings all.

    logits_RV: float32. token_R: int64. Rows do not depend on each other, not even in the last bit.
    """
    # Not log_probs = logits − logsumexp: sums over few rows may be split over threads, those within softmax are not.
    logprob_RV = torch.log_softmax(logits_RV, -1)
    id_RX = torch.cat([token_R[:, None], likeliest(logits_RV, min(num_top, logits_RV.shape[1]))], 1)
    found_RX = logprob_RV.gather(-1, id_RX).double()
    id_RX = id_RX.double()
    return torch.cat([id_RX[:, :1], found_RX[:, :1], id_RX[:, 1:], found_RX[:, 1:]], 1)


def likeliest(logits_RV: Tensor, count: int) -> Tensor:
    """Ids of the largest logits of each row, in order, of equals the lower id first: int64 [R, count]."""
    if count == 0:
        return torch.zeros(len(logits_RV), 0, dtype=torch.int64, device=logits_RV.device)
    # Which of equals `topk` takes is not said, but what the smallest of its values is.
    least_R1 = logits_RV.topk(count).values[:, -1:]
    above_RV, level_RV = logits_RV > least_R1, logits_RV == least_R1
    num_missing_R1 = count - above_RV.sum(-1, keepdim=True)
    kept_RV = above_RV | (level_RV & (level_RV.cumsum(-1) <= num_missing_R1))
    token_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    id_RK = torch.where(kept_RV, token_V, len(token_V)).topk(count, largest=False).values
    order_RK = logits_RV.gather(-1, id_RK).sort(dim=-1, descending=True, stable=True).indices
    return id_RK.gather(-1, order_RK)


def score_cells(
    logits_RV: Tensor,
    row_SW: Tensor,
    token_SW: Tensor,
    columns: Sequence[int],
    widths: Sequence[int | None],
) -> Runs | None:
    """Of the emitted tokens; None where nobody wants them told.

    row_SW, token_SW: row of the logits and token of each cell of a window; what does not count holds valid ones.
    columns: of the S sequences. widths: likeliest tokens that each wants told, None where it wants nothing told.
    """
    wanted = [(place, width) for place, width in enumerate(widths) if width is not None]
    if not wanted:
        return None
    place_E = torch.tensor([place for place, _ in wanted]).to(row_SW.device)
    row_N, token_N = (x_SW.index_select(0, place_E).flatten() for x_SW in (row_SW, token_SW))
    num_top = max(width for _, width in wanted)
    told = [score(logits_RV.index_select(0, row_N[part]), token_N[part], num_top) for part in _blocks(len(row_N))]
    return Runs(
        columns=[columns[place] for place, _ in wanted],
        counts=[row_SW.shape[1]] * len(wanted),
        widths=[width for _, width in wanted],
        told_NX=torch.cat(told),
    )


def score_prompts(rank: Rank, plan: BatchPlan, batch: Batch, hidden_ND: Tensor) -> Runs | None:
    """Of the prompt tokens behind the rows of this pass, on the leader; None elsewhere, and where nobody wants them
    told. Every rank that shares the sequences takes part.

    hidden_ND: of the target pass, for its output head.
    """
    wanted = [
        (column, known - samples, width)
        for column, (slot, known, samples) in enumerate(zip(plan.slots, plan.num_known, plan.samples, strict=True))
        if (width := rank.registers.num_prompt_logprobs[slot]) is not None and known > samples
    ]
    if not wanted:
        return None
    cells = [(column, offset) for column, count, _ in wanted for offset in range(count)]
    column_N, offset_N = torch.tensor(cells).to(hidden_ND.device).unbind(1)
    row_N = batch.starts_B.index_select(0, column_N) + offset_N
    next_N = batch.committed_B.index_select(0, column_N) + offset_N + 1
    token_N = rank.pools.tokens_at(batch.slots_B.index_select(0, column_N), next_N)
    num_top = max(width for _, _, width in wanted)
    told = []
    for part in _blocks(len(cells)):
        rows_RD = pad_rows(hidden_ND.index_select(0, row_N[part]), rank.ops.row_multiple)
        logits_RV = rank.model.vocabulary.gather(rank.model.logits(rows_RD))
        if logits_RV is not None:
            told.append(score(logits_RV[: len(row_N[part])], token_N[part], num_top))
    if not told:
        return None
    return Runs(
        columns=[column for column, _, _ in wanted],
        counts=[count for _, count, _ in wanted],
        widths=[width for _, _, width in wanted],
        told_NX=torch.cat(told),
    )


def _blocks(num_rows: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, num_rows, BLOCK))
