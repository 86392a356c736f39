"""A rank's answer to a plan: the step's one read from the device, taken apart by sequence, and one more of
log-probabilities where they are wanted. Knows no arithmetic."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workers.decide import Decision, Window
from workers.loading import Rank
from workers.logprobs import Runs
from workers.plan import BatchPlan, BatchResult, CollectiveCount, Origin, RankEnd, RankReport, StepPlan, StepTimings


def make_report(
    rank: Rank,
    plan: StepPlan,
    batch_plan: BatchPlan,
    window: Window | None,
    decision: Decision | None,
    clock: Sequence[float],
    prompts: Runs | None = None,
    looked_up: Sequence[tuple[Origin, int]] = (),
) -> RankReport:
    """clock: when the step began, the target pass ended, verification ended, the commit ended. prompts: how likely the
    tokens of prompts were. looked_up: as Proposer.looked_up, by column."""
    checks, groups = rank.checks_peers, rank.groups
    leads = groups.tp.leads
    batch = digests = None
    if leads or (checks and groups.tp.size > 1):
        batch = _read(plan, batch_plan, window, decision, prompts, looked_up)
    if checks and groups.tp.size > 1:
        assert batch is not None
        digests = _digests(rank, batch_plan, batch)
    return RankReport(
        step_id=plan.step_id,
        epoch=plan.epoch,
        batch=batch if leads else None,
        digests=digests or (),
        collectives=tuple(
            CollectiveCount(group=name, count=tally.count, digest=tally.digest)
            for name, tally in groups.log.tallies.items()
        )
        if checks
        else (),
        timings=_timings(rank, clock),
    )


def _read(
    plan: StepPlan,
    batch_plan: BatchPlan,
    window: Window | None,
    decision: Decision | None,
    prompts: Runs | None,
    looked_up: Sequence[tuple[Origin, int]],
) -> BatchResult:
    count = len(batch_plan.slots)
    emitted: list[tuple[int, ...]] = [()] * count
    drafted: list[tuple[int, ...]] = [()] * count
    scores: list[tuple[float, ...]] = [()] * count
    acceptance: list[tuple[float, ...]] = [()] * count
    margins: list[tuple[float, ...]] = [()] * count if plan.report_margins else []
    accepted, admitted = [0] * count, [0] * count
    if window is not None and decision is not None:
        numbers = torch.stack([decision.num_emitted_S, decision.num_accepted_S, window.num_drafts_S], 1)
        whole = (numbers, decision.tokens_SW, window.drafts_SG)
        real = (window.scores_SG, decision.acceptance_SV, decision.margins_SW)
        for column, parts in zip(window.columns, _read_rows(whole, real), strict=True):
            (num_emitted, num_accepted, num_admitted), tokens, drafts, *floats = parts
            num_drafts, num_reached = batch_plan.num_drafts[column], min(num_accepted + 1, num_admitted)
            accepted[column], admitted[column] = num_accepted, num_admitted
            emitted[column], drafted[column] = tuple(tokens[:num_emitted]), tuple(drafts[:num_drafts])
            scores[column], acceptance[column] = tuple(floats[0][:num_drafts]), tuple(floats[1][:num_reached])
            if plan.report_margins:
                margins[column] = tuple(floats[2][:num_emitted])
    return BatchResult(
        emitted=tuple(emitted),
        drafted=tuple(drafted),
        num_admitted=tuple(admitted),
        num_accepted=tuple(accepted),
        margins=tuple(margins),
        scores=tuple(scores),
        acceptance=tuple(acceptance),
        **_origins(batch_plan, looked_up),
        **_constrained(count, window, decision),
        **_told(emitted, decision, prompts),
    )


def _origins(plan: BatchPlan, looked_up: Sequence[tuple[Origin, int]]) -> dict[str, Any]:
    """Columns of what made the drafts that wait; none where the drafter made all of them."""
    counts = [
        (origin, min(count, waiting)) if waiting else (Origin.DRAFTER, 0)
        for (origin, count), waiting in zip(looked_up, plan.num_drafts, strict=bool(looked_up))
    ]
    if all(origin is Origin.DRAFTER for origin, _ in counts):
        return {}
    origins, num_looked_up = zip(*counts, strict=True)
    return {"origins": origins, "num_looked_up": num_looked_up}


def _constrained(count: int, window: Window | None, decision: Decision | None) -> dict[str, Any]:
    """Columns of what constraints had a say in; none where they had none."""
    if window is None or decision is None or not decision.ends:
        return {}
    ends, forbidden = [RankEnd.NONE] * count, [0] * count
    for place, column in enumerate(window.columns):
        ends[column] = decision.ends[place]
        forbidden[column] = decision.num_forbidden[place] if decision.num_forbidden else 0
    return {"ends": tuple(ends), "num_forbidden": tuple(forbidden), "problems": decision.problems}


def _told(emitted: Sequence[Sequence[int]], decision: Decision | None, prompts: Runs | None) -> dict[str, Any]:
    """Columns of log-probabilities, those of emitted tokens cut as these are; none where nobody wants any."""
    columns: dict[str, Any] = {}
    if decision is not None and decision.told is not None:
        told = decision.told.read()
        columns["logprobs"] = tuple(told.get(column, ())[: len(tokens)] for column, tokens in enumerate(emitted))
    if prompts is not None:
        told = prompts.read()
        columns["prompt_logprobs"] = tuple(told.get(column, ()) for column in range(len(emitted)))
    return columns


def _read_rows(whole: Sequence[Tensor], real: Sequence[Tensor | None]) -> list[tuple[list[Any], ...]]:
    """Per sequence, its row of each tensor, the whole numbers first; an empty row of one that is not there. One read
    brings all: as bits of float64, real numbers fit between integers."""
    widths = [x_SX.shape[1] for x_SX in whole]
    real_widths = [0 if x_SX is None else x_SX.shape[1] for x_SX in real]
    bits = [x_SX.to(torch.float64).view(torch.int64) for x_SX in real if x_SX is not None]
    read_SX = torch.cat([*whole, *bits], 1).cpu()
    whole_SX, real_SX = read_SX[:, : sum(widths)], read_SX[:, sum(widths) :].view(torch.float64)
    rows = [part.tolist() for part in (*torch.split(whole_SX, widths, 1), *torch.split(real_SX, real_widths, 1))]
    return list(zip(*rows, strict=True))


def _digests(rank: Rank, plan: BatchPlan, batch: BatchResult) -> tuple[int, ...]:
    """Per sequence, of what this rank did and holds now, not of what it was told: drafts admitted, committed length,
    newest logged tokens."""
    if not plan.slots:
        return ()
    pools = rank.pools
    slots_B = torch.tensor(plan.slots, device=pools.device)
    committed_B = pools.committed_len.index_select(0, slots_B)
    width = max(map(len, batch.emitted))
    # The newest token lies at committed_len; those before it reach back from there.
    index_BW = committed_B[:, None] - torch.arange(width, device=pools.device)
    tokens_BW = pools.tokens_at(slots_B[:, None], index_BW.clamp(min=0))
    held: Tensor = torch.cat([committed_B[:, None], tokens_BW], 1).cpu()
    return tuple(
        zlib.crc32(repr((slot, epoch, admitted, row[: 1 + len(emitted)])).encode())
        for slot, epoch, admitted, row, emitted in zip(
            plan.slots, plan.epochs, batch.num_admitted, held.tolist(), batch.emitted, strict=True
        )
    )


def _timings(rank: Rank, clock: Sequence[float]) -> StepTimings:
    owners = rank.model.owners
    num_pairs = int(owners.num_pairs) if owners is not None else 0
    begin, target, verified, committed = clock[:4]
    end = time.perf_counter()
    # On GPUs work is queued and these are times of launching, but for the last, which waits.
    return StepTimings(
        total_s=end - begin,
        target_s=target - begin,
        verify_s=verified - target,
        commit_s=committed - verified,
        draft_s=end - committed,
        collective_s=rank.groups.log.waited_s,
        dispatch_s=owners.dispatch_s if owners is not None else 0.0,
        combine_s=owners.combine_s if owners is not None else 0.0,
        expert_rows=num_pairs,
    )
