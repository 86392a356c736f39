"""What a step emits: laws at the window's rows, verification, clipping, and the new tokens in the log.

The window holds the sequences that sample in this step, S of them, W = 1 + the most drafts of any. Cell j is the law of
log index first_index + j, from flat row first_row + j; it counts for j ≤ num_drafts. Knows no commit and no drafting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.batch import Batch
from workers.inputs import StepColumns
from workers.loading import Rank
from workers.plan import BatchPlan
from workers.rows import pad_rows
from workers.sampling.processors import target_law
from workers.sampling.registers import Modes
from workers.sampling.verify import DrawParams, Verdict, clip_emitted, verify, verify_coupled


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """columns, slots: host values. drafts_SG: the waiting drafts, G = W − 1; num_drafts_S: how many were admitted.
    first_position_S: output position of cell 0, which is also the number of tokens emitted before."""

    columns: tuple[int, ...]
    slots: tuple[int, ...]
    width: int
    modes: Modes
    columns_S: Tensor
    slots_S: Tensor
    drafts_SG: Tensor
    num_drafts_S: Tensor
    first_row_S: Tensor
    first_index_S: Tensor
    first_position_S: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What each sequence of a window emits, the same on all ranks that share it.

    tokens_SW: the first num_emitted_S of each row are kept. num_accepted_S: drafts that stood before clipping.
    margins_SW: lead of the largest logit, on the leader and where the plan asks."""

    tokens_SW: Tensor
    num_emitted_S: Tensor
    num_accepted_S: Tensor
    margins_SW: Tensor | None


def open_window(
    rank: Rank, plan: BatchPlan, sampling: tuple[int, ...], columns: StepColumns, batch: Batch, admitted_B: Tensor
) -> Window | None:
    """The window of the columns that sample; None where none does. Reads the waiting drafts while they are there."""
    if not sampling:
        return None
    slots = tuple(plan.slots[i] for i in sampling)
    width = 1 + max(plan.num_drafts[i] for i in sampling)
    columns_S = columns.sampling_S
    slots_S = columns.slots_B.index_select(0, columns_S)
    known_S = columns.num_known_B.index_select(0, columns_S)
    first_index_S = batch.committed_B.index_select(0, columns_S) + known_S
    index_SG = first_index_S[:, None] + torch.arange(width - 1, device=slots_S.device)
    return Window(
        columns=sampling,
        slots=slots,
        width=width,
        modes=rank.registers.modes(slots),
        columns_S=columns_S,
        slots_S=slots_S,
        drafts_SG=rank.pools.tokens_at(slots_S[:, None], index_SG),
        num_drafts_S=admitted_B.index_select(0, columns_S),
        first_row_S=batch.starts_B.index_select(0, columns_S) + known_S - 1,
        first_index_S=first_index_S,
        first_position_S=first_index_S - rank.pools.prompt_len.index_select(0, slots_S),
    )


def decide(rank: Rank, window: Window, hidden_ND: Tensor, *, step_id: int, report_margins: bool) -> Decision:
    """Verifies the drafts, clips the run at EOS, stop ids and the limit, and writes the emitted tokens to the log.

    One of the ranks that share the sequences decides; the others are told."""
    logits_RP = _logits(rank, window, hidden_ND)
    verdict, margins_SW = _judge(rank, window, logits_RP, step_id, report_margins)
    registers, width = rank.registers, window.width
    decided_SX = torch.empty(len(window.slots), width + 2, dtype=torch.int64, device=hidden_ND.device)
    if verdict is not None:
        num_emitted_S = clip_emitted(
            verdict.tokens_BW,
            verdict.num_emitted_B,
            registers.stop_ids.index_select(0, window.slots_S),
            registers.max_tokens.index_select(0, window.slots_S) - window.first_position_S,
        )
        # Cells beyond the emitted ones stay unread; 0 keeps them valid ids.
        parts = [verdict.tokens_BW.clamp(min=0), num_emitted_S[:, None], verdict.num_accepted_B[:, None]]
        decided_SX = torch.cat(parts, 1)
    decided_SX = rank.groups.tp.broadcast(decided_SX)
    tokens_SW, num_emitted_S, num_accepted_S = decided_SX[:, :width], decided_SX[:, -2], decided_SX[:, -1]
    index_SW = window.first_index_S[:, None] + torch.arange(width, device=hidden_ND.device)
    rank.pools.log_tokens(window.slots_S[:, None], index_SW, tokens_SW)
    return Decision(
        tokens_SW=tokens_SW, num_emitted_S=num_emitted_S, num_accepted_S=num_accepted_S, margins_SW=margins_SW
    )


def _logits(rank: Rank, window: Window, hidden_ND: Tensor) -> Tensor:
    """This rank's logits of every cell, [S · W (padded), P]; cells beyond the admitted drafts repeat the last one that
    counts."""
    cell_W = torch.arange(window.width, device=hidden_ND.device)
    rows_SW = window.first_row_S[:, None] + torch.minimum(cell_W, window.num_drafts_S[:, None])
    return rank.model.logits(pad_rows(hidden_ND.index_select(0, rows_SW.view(-1)), rank.ops.row_multiple))


def _judge(
    rank: Rank, window: Window, logits_RP: Tensor, step_id: int, report_margins: bool
) -> tuple[Verdict | None, Tensor | None]:
    """Verdict and margins, on the leader; nothing elsewhere."""
    registers, modes, slots_S = rank.registers, window.modes, window.slots_S
    shape = (len(window.slots), window.width)
    num_cells = shape[0] * shape[1]
    vocabulary = rank.model.vocabulary
    if not modes.any_sampled:
        best = vocabulary.best(logits_RP[:num_cells], with_second=report_margins)
        if best is None:
            return None, None
        verdict = verify_coupled(best.id_R.view(shape), window.drafts_SG, window.num_drafts_S)
        return verdict, None if best.second_R is None else (best.top_R - best.second_R).view(shape)
    logits_RV = vocabulary.gather(logits_RP)
    if logits_RV is None:
        return None, None
    slots_R = pad_rows(slots_S.repeat_interleave(window.width), rank.ops.row_multiple)
    law_RV = target_law(logits_RV, registers.row_params(slots_R), any_sampled=True, any_sorted=modes.any_sorted)
    verdict = verify(
        law_RV[:num_cells].view(*shape, -1),
        rank.pools.draft_law[:, : window.width - 1].index_select(0, slots_S) if modes.any_standard else None,
        window.drafts_SG,
        window.num_drafts_S,
        DrawParams(
            greedy_N=registers.temperature.index_select(0, slots_S) == 0,
            coupled_N=registers.coupled.index_select(0, slots_S),
            seed_N=registers.seed.index_select(0, slots_S),
            position_N=window.first_position_S,
        ),
        step_id,
        any_standard=modes.any_standard,
        any_coupled=modes.any_coupled,
    )
    if not report_margins:
        return verdict, None
    top_R2 = logits_RV[:num_cells].topk(2).values
    return verdict, (top_R2[:, 0] - top_R2[:, 1]).view(shape)
