"""What the ranks of a group must agree on: what they loaded, and what they did in a step. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parallel.mesh import Mesh
from runtime.cluster.inquest import rank_name
from workers.plan import LoadError, RankReport, RanksDisagree, StepPlan, StepResult, WorkerDescription

_SAME_EVERYWHERE = ("model_type", "vocab_size", "gamma_max", "page_size", "cache_groups", "dtype", "numerics")
"""What a plan relies on for all ranks at once, or a sum over ranks."""


def merge_descriptions(mesh: Mesh, ranks: Sequence[WorkerDescription]) -> WorkerDescription:
    """Rank 0's, with the slots and pages that every rank has. Raises LoadError that names rank and field."""
    first = ranks[0]
    for rank, other in enumerate(ranks):
        for field in _SAME_EVERYWHERE:
            here, there = getattr(other, field), getattr(first, field)
            if here != there:
                raise LoadError(
                    f"{rank_name(mesh, rank)} has {field} {here!r}, {rank_name(mesh, 0)} has {there!r}; give all ranks "
                    "the same checkpoint, settings and kind of device"
                )
    return replace(
        first,
        num_slots=min(each.num_slots for each in ranks),
        num_pages=tuple(min(counts) for counts in zip(*(each.num_pages for each in ranks), strict=True)),
    )


def merge_reports(mesh: Mesh, reports: Sequence[RankReport]) -> StepResult:
    """Tokens from those who lead, timings from all. Every report has been checked against the plan on arrival."""
    batches = [reports[rank].batch for rank in mesh.leaders()]
    return StepResult(
        step_id=reports[0].step_id,
        epoch=reports[0].epoch,
        batches=tuple(batch for batch in batches if batch is not None),
        timings=tuple(report.timings for report in reports),
    )


def check_ranks(mesh: Mesh, plan: StepPlan, reports: Sequence[RankReport]) -> None:
    """Raises RanksDisagree when ranks of one data-parallel rank committed something else, or ranks of one group joined
    other collectives; the text names step, ranks and the first difference."""
    for leader in mesh.leaders():
        for rank in mesh.tp_ranks(leader):
            _check_commits(mesh, plan, reports, leader, rank)
            _check_groups(mesh, plan, reports, leader, rank)
    _check_collectives(mesh, plan, reports)


def _check_commits(mesh: Mesh, plan: StepPlan, reports: Sequence[RankReport], leader: int, rank: int) -> None:
    batch = plan.batches[mesh.dp_rank(rank)]
    ours, theirs = reports[leader].digests, reports[rank].digests
    if mesh.tp > 1 and len(theirs) != len(batch.slots):
        raise RanksDisagree(f"step {plan.step_id}: {rank_name(mesh, rank)} told nothing of what it committed")
    for slot, epoch, here, there in zip(batch.slots, batch.epochs, ours, theirs, strict=False):
        if here != there:
            raise RanksDisagree(
                f"step {plan.step_id}: {rank_name(mesh, leader)} and {rank_name(mesh, rank)} committed different "
                f"tokens for slot {slot}, epoch {epoch} (digests {here:08x} and {there:08x})"
            )


def _check_groups(mesh: Mesh, plan: StepPlan, reports: Sequence[RankReport], leader: int, rank: int) -> None:
    """Ranks that share sequences belong to the same groups."""
    ours, theirs = ({each.group for each in reports[of].collectives} for of in (leader, rank))
    if ours != theirs:
        raise RanksDisagree(
            f"step {plan.step_id}: {rank_name(mesh, leader)} tells of collectives in {sorted(ours)}, "
            f"{rank_name(mesh, rank)} in {sorted(theirs)}"
        )


def _check_collectives(mesh: Mesh, plan: StepPlan, reports: Sequence[RankReport]) -> None:
    first: dict[str, tuple[int, int, int]] = {}
    for rank, report in enumerate(reports):
        for each in report.collectives:
            other, count, digest = first.setdefault(each.group, (rank, each.count, each.digest))
            if (each.count, each.digest) != (count, digest):
                raise RanksDisagree(
                    f"step {plan.step_id}: in group {each.group!r} {rank_name(mesh, other)} joined {count} collectives "
                    f"and {rank_name(mesh, rank)} {each.count} (digests {digest:08x} and {each.digest:08x})"
                )
