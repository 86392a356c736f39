"""A rank's answer to a plan: the step's one read from the device, taken apart by sequence. Knows no arithmetic."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.decide import Decision, Window
from workers.loading import Rank
from workers.plan import BatchPlan, BatchResult, CollectiveCount, RankReport, StepPlan, StepTimings


def make_report(
    rank: Rank,
    plan: StepPlan,
    batch_plan: BatchPlan,
    window: Window | None,
    decision: Decision | None,
    clock: Sequence[float],
) -> RankReport:
    """clock: when the step began, the target pass ended, verification ended, the commit ended."""
    checks, groups = rank.checks_peers, rank.groups
    leads = groups.tp.leads
    batch = digests = None
    if leads or (checks and groups.tp.size > 1):
        batch = _read(plan, batch_plan, window, decision)
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


def _read(plan: StepPlan, batch_plan: BatchPlan, window: Window | None, decision: Decision | None) -> BatchResult:
    count = len(batch_plan.slots)
    emitted: list[tuple[int, ...]] = [()] * count
    drafted: list[tuple[int, ...]] = [()] * count
    margins: list[tuple[float, ...]] = [()] * count if plan.report_margins else []
    accepted, admitted = [0] * count, [0] * count
    if window is not None and decision is not None:
        numbers = torch.stack([decision.num_emitted_S, decision.num_accepted_S, window.num_drafts_S], 1)
        parts = [numbers, decision.tokens_SW, window.drafts_SG]
        if decision.margins_SW is not None:
            # As bits of float64 they fit between the integers, and there is still but one read.
            parts.append(decision.margins_SW.to(torch.float64).view(torch.int64))
        read = torch.cat(parts, 1).cpu()
        first_draft = 3 + window.width
        for column, row in zip(window.columns, read.tolist(), strict=True):
            emitted[column] = tuple(row[3 : 3 + row[0]])
            drafted[column] = tuple(row[first_draft : first_draft + batch_plan.num_drafts[column]])
            accepted[column], admitted[column] = row[1], row[2]
        if decision.margins_SW is not None:
            leads = read[:, -window.width :].view(torch.float64).tolist()
            for column, lead in zip(window.columns, leads, strict=True):
                margins[column] = tuple(lead[: len(emitted[column])])
    return BatchResult(
        emitted=tuple(emitted),
        drafted=tuple(drafted),
        num_admitted=tuple(admitted),
        num_accepted=tuple(accepted),
        margins=tuple(margins),
    )


def _digests(rank: Rank, plan: BatchPlan, batch: BatchResult) -> tuple[int, ...]:
    """Per sequence, of what this rank holds now, not of what it was told: committed length, newest logged tokens."""
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
        zlib.crc32(repr((slot, epoch, row[: 1 + len(emitted)])).encode())
        for slot, epoch, row, emitted in zip(plan.slots, plan.epochs, held.tolist(), batch.emitted, strict=True)
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
