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
from workers.plan import StepPlan
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
    """num_emitted_S: tokens of `verdict` that are kept. margins_SW: lead of the largest logit, where the plan asks."""

    verdict: Verdict
    num_emitted_S: Tensor
    margins_SW: Tensor | None


def open_window(
    rank: Rank, plan: StepPlan, sampling: tuple[int, ...], columns: StepColumns, batch: Batch, admitted_B: Tensor
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


def decide(rank: Rank, window: Window, hidden_ND: Tensor, plan: StepPlan) -> Decision:
    """Verifies the drafts, clips the run at EOS, stop ids and the limit, and writes the emitted tokens to the log."""
    logits_RV = _logits(rank, window, hidden_ND)
    verdict = _verify(rank, window, logits_RV, plan.step_id)
    registers = rank.registers
    num_emitted_S = clip_emitted(
        verdict.tokens_BW,
        verdict.num_emitted_B,
        registers.stop_ids.index_select(0, window.slots_S),
        registers.max_tokens.index_select(0, window.slots_S) - window.first_position_S,
    )
    # Cells beyond the emitted ones stay unread; 0 keeps them valid ids.
    index_SW = window.first_index_S[:, None] + torch.arange(window.width, device=hidden_ND.device)
    rank.pools.log_tokens(window.slots_S[:, None], index_SW, verdict.tokens_BW.clamp(min=0))
    margins_SW = _margins(window, logits_RV) if plan.report_margins else None
    return Decision(verdict=verdict, num_emitted_S=num_emitted_S, margins_SW=margins_SW)


def _logits(rank: Rank, window: Window, hidden_ND: Tensor) -> Tensor:
    """Logits of every cell, [S · W (padded), V]; cells beyond the admitted drafts repeat the last one that counts."""
    cell_W = torch.arange(window.width, device=hidden_ND.device)
    rows_SW = window.first_row_S[:, None] + torch.minimum(cell_W, window.num_drafts_S[:, None])
    return rank.model.logits(pad_rows(hidden_ND.index_select(0, rows_SW.view(-1)), rank.ops.row_multiple))


def _verify(rank: Rank, window: Window, logits_RV: Tensor, step_id: int) -> Verdict:
    registers, modes, slots_S = rank.registers, window.modes, window.slots_S
    count, width = len(window.slots), window.width
    if not modes.any_sampled:
        y_SW = logits_RV.argmax(-1)[: count * width].view(count, width)
        return verify_coupled(y_SW, window.drafts_SG, window.num_drafts_S)
    slots_R = pad_rows(slots_S.repeat_interleave(width), rank.ops.row_multiple)
    law_RV = target_law(logits_RV, registers.row_params(slots_R), any_sampled=True, any_sorted=modes.any_sorted)
    return verify(
        law_RV[: count * width].view(count, width, -1),
        rank.pools.draft_law[:, : width - 1].index_select(0, slots_S) if modes.any_standard else None,
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


def _margins(window: Window, logits_RV: Tensor) -> Tensor:
    """By how much the largest logit of each cell leads the second, float32 [S, W]."""
    shape = (len(window.slots), window.width)
    top_R2 = logits_RV[: shape[0] * shape[1]].topk(2).values
    return (top_R2[:, 0] - top_R2[:, 1]).view(shape)
