"""What a step emits: laws at the window's rows, verification, clipping, and the new tokens in the log.

The window holds the sequences that sample in this step, S of them, W = 1 + the most drafts that any may have admitted.
Cell j is the law of log index first_index + j, and counts for j ≤ num_drafts. Laws are made of the cells that count, R
of them at most, and then spread over the window; cells that do not count repeat the last one that does:

    num_drafts 2, 0, 1    laws  [ a0 a1 a2 | b0 | c0 c1 ]    cells  [ a0 a1 a2 ]  [ b0 b0 b0 ]  [ c0 c1 c1 ]

Knows no commit and no drafting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.batch import Batch
from workers.constraints.matchers import Followed
from workers.inputs import StepColumns
from workers.loading import Rank
from workers.logprobs import Runs, score_cells
from workers.plan import BatchPlan, RankEnd
from workers.rows import pad_rows
from workers.sampling.processing import Processing
from workers.sampling.processors import target_law
from workers.sampling.registers import Modes
from workers.sampling.shaper import Rows
from workers.sampling.verify import DrawParams, Verdict, clip_emitted, verify, verify_coupled


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """columns, slots: host values. num_drafts_S: how many drafts were admitted. drafts_SG, scores_SG: of all that
    waited, G ≥ W − 1 at most. first_position_S: output position of cell 0, which is also the number of tokens emitted
    before. rows_R, owners_R, index_R: flat row of the pass, sequence and log index of each law. longest: a bound of the
    latter, on the host. law_SW: law of each cell; None where they are the cells in their order."""

    columns: tuple[int, ...]
    slots: tuple[int, ...]
    width: int
    modes: Modes
    columns_S: Tensor
    slots_S: Tensor
    drafts_SG: Tensor
    scores_SG: Tensor
    num_drafts_S: Tensor
    first_index_S: Tensor
    first_position_S: Tensor
    rows_R: Tensor
    owners_R: Tensor
    index_R: Tensor
    longest: int
    law_SW: Tensor | None

    @property
    def candidates(self) -> Tensor:
        """The drafts that may have been admitted, [S, W − 1]."""
        return self.drafts_SG[:, : self.width - 1]

    def law_rows(self, num_rows: int) -> Rows:
        """The laws as what requests do to logits knows them, up to a padded number of rows."""
        missing = num_rows - len(self.rows_R)
        return Rows(
            slots=self.slots,
            slots_S=self.slots_S,
            owners_R=F.pad(self.owners_R, (0, missing)),
            index_R=F.pad(self.index_R, (0, missing)),
            first_S=self.first_index_S,
            width=self.width,
            longest=self.longest,
        )

    def spread(self, x_R: Tensor) -> Tensor:
        """What is known per law, [R (padded), ...], per cell: [S, W, ...]."""
        shape = (len(self.slots), self.width, *x_R.shape[1:])
        if self.law_SW is None:
            return x_R[: len(self.rows_R)].view(shape)
        return x_R.index_select(0, self.law_SW.view(-1)).view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What each sequence of a window emits, the same on all ranks that share it.

    tokens_SW: the first num_emitted_S of each row are kept. num_accepted_S: drafts that stood before clipping.
    acceptance_SV: float32, with which probability each draft stands, as in `Verdict`, V = W − 1; on the leader.
    margins_SW: lead of the largest logit, on the leader and where the plan asks.
    num_forbidden, ends: per sequence; () where no constraint has a say. problems: of those whose constraint broke.
    told: how likely the tokens were, on the leader and where it is wanted; of all cells."""

    tokens_SW: Tensor
    num_emitted_S: Tensor
    num_accepted_S: Tensor
    acceptance_SV: Tensor | None
    margins_SW: Tensor | None
    num_forbidden: tuple[int, ...] = ()
    ends: tuple[RankEnd, ...] = ()
    problems: tuple[str, ...] = ()
    told: Runs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judgement:
    """What the leader finds. raw_RV: logits as the model gave them; None where nobody asked for whole rows."""

    verdict: Verdict
    margins_SW: Tensor | None
    num_forbidden: tuple[int, ...] = ()
    raw_RV: Tensor | None = None


def open_window(
    rank: Rank,
    plan: BatchPlan,
    sampling: tuple[int, ...],
    columns: StepColumns,
    batch: Batch,
    admitted_B: Tensor,
    *,
    exact: bool,
) -> Window | None:
    """The window of the columns that sample; None where none does. Reads the waiting drafts while they are there.

    exact: promises that every draft is admitted that the budget covers."""
    if not sampling:
        return None
    slots = tuple(plan.slots[i] for i in sampling)
    waiting = [plan.num_drafts[i] for i in sampling]
    num_waiting, most = max(waiting), min(max(waiting), plan.verify_budget)
    columns_S = columns.sampling_S
    slots_S = columns.slots_B.index_select(0, columns_S)
    known_S = columns.num_known_B.index_select(0, columns_S)
    first_index_S = batch.committed_B.index_select(0, columns_S) + known_S
    num_drafts_S = admitted_B.index_select(0, columns_S)
    owners_R, cell_R, law_SW = _place_laws(num_drafts_S, 1 + most, len(slots) + min(sum(waiting), plan.verify_budget))
    first_row_S = batch.starts_B.index_select(0, columns_S) + known_S - 1
    index_SG = first_index_S[:, None] + torch.arange(num_waiting, device=slots_S.device)
    return Window(
        columns=sampling,
        slots=slots,
        width=1 + most,
        modes=rank.registers.modes(slots),
        columns_S=columns_S,
        slots_S=slots_S,
        drafts_SG=rank.pools.tokens_at(slots_S[:, None], index_SG),
        scores_SG=rank.pools.score[:, :num_waiting].index_select(0, slots_S),
        num_drafts_S=num_drafts_S,
        first_index_S=first_index_S,
        first_position_S=first_index_S - rank.pools.prompt_len.index_select(0, slots_S),
        rows_R=first_row_S.index_select(0, owners_R) + cell_R,
        owners_R=owners_R,
        index_R=first_index_S.index_select(0, owners_R) + cell_R,
        longest=max(plan.max_committed[i] + plan.num_known[i] for i in sampling) + 1 + most,
        law_SW=None if exact and all(min(count, most) == most for count in waiting) else law_SW,
    )


def _place_laws(num_drafts_S: Tensor, width: int, num_laws: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence and cell of each of `num_laws` laws, and the law of each cell. Laws beyond those that count repeat the
    last one."""
    counts_S = num_drafts_S + 1
    ends_S = counts_S.cumsum(0)
    starts_S = ends_S - counts_S
    law_R = torch.arange(num_laws, device=ends_S.device)
    owners_R = torch.searchsorted(ends_S, law_R, right=True).clamp_(max=len(ends_S) - 1)
    cell_R = torch.minimum(law_R - starts_S.index_select(0, owners_R), num_drafts_S.index_select(0, owners_R))
    cell_W = torch.arange(width, device=ends_S.device)
    return owners_R, cell_R, starts_S[:, None] + torch.minimum(cell_W, num_drafts_S[:, None])


def decide(rank: Rank, window: Window, hidden_ND: Tensor, *, step_id: int, report_margins: bool) -> Decision:
    """Verifies the drafts, clips the run at EOS, stop ids and the limit, and writes the emitted tokens to the log.

    One of the ranks that share the sequences decides; the others are told."""
    logits_RP = _logits(rank, window, hidden_ND)
    found = _judge(rank, window, logits_RP, step_id, report_margins)
    registers, width = rank.registers, window.width
    decided_SX = torch.empty(len(window.slots), width + 2, dtype=torch.int64, device=hidden_ND.device)
    followed: list[Followed] = []
    if found is not None:
        verdict = found.verdict
        num_emitted_S = clip_emitted(
            verdict.tokens_BW,
            verdict.num_emitted_B,
            registers.stop_ids.index_select(0, window.slots_S),
            registers.max_tokens.index_select(0, window.slots_S) - window.first_position_S,
        )
        if rank.processing is not None and rank.processing.matchers.constrains(window.slots):
            followed = _follow(rank.processing, window, verdict.tokens_BW, num_emitted_S)
            num_emitted_S = torch.tensor([one.count for one in followed]).to(num_emitted_S)
        # Cells beyond the emitted ones stay unread; 0 keeps them valid ids.
        parts = [verdict.tokens_BW.clamp(min=0), num_emitted_S[:, None], verdict.num_accepted_B[:, None]]
        decided_SX = torch.cat(parts, 1)
    decided_SX = rank.groups.tp.broadcast(decided_SX)
    tokens_SW, num_emitted_S, num_accepted_S = decided_SX[:, :width], decided_SX[:, -2], decided_SX[:, -1]
    index_SW = window.first_index_S[:, None] + torch.arange(width, device=hidden_ND.device)
    rank.pools.log_tokens(window.slots_S[:, None], index_SW, tokens_SW)
    return Decision(
        tokens_SW=tokens_SW,
        num_emitted_S=num_emitted_S,
        num_accepted_S=num_accepted_S,
        # Sums of rounded laws may pass 1 in the last bits.
        acceptance_SV=None if found is None else found.verdict.acceptance_BG.clamp(max=1.0).float(),
        margins_SW=None if found is None else found.margins_SW,
        num_forbidden=() if found is None else found.num_forbidden,
        ends=tuple(one.end for one in followed),
        problems=tuple(one.problem for one in followed if one.end is RankEnd.BROKEN),
        told=None if found is None else _tell(rank, window, found.raw_RV, tokens_SW),
    )


def _tell(rank: Rank, window: Window, raw_RV: Tensor | None, tokens_SW: Tensor) -> Runs | None:
    """How likely the tokens were, of those sequences that want it told."""
    if raw_RV is None or not window.modes.any_logprobs:
        return None
    row_SW = window.spread(torch.arange(len(raw_RV), device=raw_RV.device))
    widths = [rank.registers.num_logprobs[slot] for slot in window.slots]
    return score_cells(raw_RV, row_SW, tokens_SW, window.columns, widths)


def _follow(processing: Processing, window: Window, tokens_SW: Tensor, num_emitted_S: Tensor) -> list[Followed]:
    """How far constraints let each run stand; they go on from there."""
    return [
        processing.matchers.follow(slot, tokens[:count])
        for slot, tokens, count in zip(window.slots, tokens_SW.tolist(), num_emitted_S.tolist(), strict=True)
    ]


def _logits(rank: Rank, window: Window, hidden_ND: Tensor) -> Tensor:
    """This rank's logits of every law, [R (padded), P]."""
    return rank.model.logits(pad_rows(hidden_ND.index_select(0, window.rows_R), rank.ops.row_multiple))


def _judge(rank: Rank, window: Window, logits_RP: Tensor, step_id: int, report_margins: bool) -> _Judgement | None:
    """On the leader; None elsewhere."""
    registers, modes, slots_S = rank.registers, window.modes, window.slots_S
    num_laws = len(window.rows_R)
    vocabulary = rank.model.vocabulary
    if not (modes.any_sampled or modes.any_whole or modes.any_logprobs):
        best = vocabulary.best(logits_RP[:num_laws], with_second=report_margins)
        if best is None:
            return None
        verdict = verify_coupled(window.spread(best.id_R), window.candidates, window.num_drafts_S)
        margins_SW = None if best.second_R is None else window.spread(best.top_R - best.second_R)
        return _Judgement(verdict=verdict, margins_SW=margins_SW)
    raw_RV = vocabulary.gather(logits_RP)
    if raw_RV is None:
        return None
    assert rank.processing is not None
    logits_RV, num_forbidden = rank.processing.of_window(
        raw_RV, window.law_rows(len(raw_RV)), window.candidates, window.num_drafts_S
    )
    slots_R = pad_rows(slots_S.index_select(0, window.owners_R), rank.ops.row_multiple)
    law_RV = target_law(
        logits_RV,
        registers.row_params(slots_R),
        any_sampled=modes.any_sampled,
        any_sorted=modes.any_sorted,
        any_typical=modes.any_typical,
    )
    verdict = verify(
        window.spread(law_RV),
        rank.pools.draft_law[:, : window.width - 1].index_select(0, slots_S) if modes.any_standard else None,
        window.candidates,
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
        typical=registers.typical_params(slots_S) if modes.any_lossy else None,
    )
    margins_SW = None
    if report_margins:
        top_R2 = logits_RV[:num_laws].topk(2).values
        margins_SW = window.spread(top_R2[:, 0] - top_R2[:, 1])
    return _Judgement(verdict=verdict, margins_SW=margins_SW, num_forbidden=num_forbidden, raw_RV=raw_RV)
