"""What ranks of a group must agree on, and the words in which a difference is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import echo_worker

from parallel.mesh import Mesh
from runtime.cluster.agreement import check_ranks, merge_descriptions, merge_reports
from workers.plan import (
    BatchPlan,
    BatchResult,
    CollectiveCount,
    LoadError,
    RankReport,
    RanksDisagree,
    StepPlan,
    StepTimings,
)

FOUR = Mesh(dp=2, tp=2, ep=4)


def column(*slots: int) -> BatchPlan:
    n = len(slots)
    return BatchPlan(slots=slots, epochs=tuple(slot + 10 for slot in slots), num_known=(1,) * n, num_drafts=(0,) * n)


PLAN = StepPlan(step_id=5, epoch=2, batches=(column(3, 4), column(3)))


def report(rank: int, digests: tuple[int, ...], *groups: CollectiveCount) -> RankReport:
    tokens = BatchResult(emitted=((rank,),)) if FOUR.leads(rank) else None
    timings = StepTimings(total_s=float(rank))
    return RankReport(step_id=5, epoch=2, batch=tokens, digests=digests, collectives=groups, timings=timings)


def tally(group: str, count: int = 3, digest: int = 7) -> CollectiveCount:
    return CollectiveCount(group=group, count=count, digest=digest)


def good() -> list[RankReport]:
    return [
        report(0, (1, 2), tally("tp.0", 4), tally("world")),
        report(1, (1, 2), tally("tp.0", 4), tally("world")),
        report(2, (9,), tally("tp.1", 2), tally("world")),
        report(3, (9,), tally("tp.1", 2), tally("world")),
    ]


def test_ranks_that_agree_pass_and_their_reports_become_one_result() -> None:
    reports = good()
    check_ranks(FOUR, PLAN, reports)
    result = merge_reports(FOUR, reports)
    assert (result.step_id, result.epoch) == (5, 2)
    assert [batch.emitted for batch in result.batches] == [((0,),), ((2,),)]
    assert [timings.total_s for timings in result.timings] == [0, 1, 2, 3]
    assert result.slowest.total_s == 3


@pytest.mark.parametrize(
    ("rank", "changes", "text"),
    [
        (
            1,
            {"digests": (1, 3)},
            r"^step 5: rank 0 \(dp 0, tp 0\) and rank 1 \(dp 0, tp 1\) committed different tokens for slot 4, epoch 14 "
            r"\(digests 00000002 and 00000003\)$",
        ),
        (2, {"digests": (8,)}, r"rank 2 .* and rank 3 .* slot 3, epoch 13"),
        (3, {"digests": ()}, r"rank 3 \(dp 1, tp 1\) told nothing"),
        (
            3,
            {"collectives": (tally("tp.1", 2), tally("world", 4))},
            r"^step 5: in group 'world' rank 0 \(dp 0, tp 0\) joined 3 collectives and rank 3 \(dp 1, tp 1\) 4 "
            r"\(digests 00000007 and 00000007\)$",
        ),
        (
            1,
            {"collectives": (tally("tp.0", 4, 6), tally("world"))},
            r"'tp.0' rank 0 .* 4 collectives and rank 1 .* 4 \(digests 00000007 and 00000006\)",
        ),
        (1, {"collectives": (tally("world"),)}, r"rank 0 .* in \['tp.0', 'world'\], rank 1 .* in \['world'\]"),
    ],
)
def test_a_difference_is_named(rank: int, changes: dict[str, object], text: str) -> None:
    reports = good()
    reports[rank] = replace(reports[rank], **changes)  # type: ignore[arg-type]
    with pytest.raises(RanksDisagree, match=text):
        check_ranks(FOUR, PLAN, reports)


def test_a_rank_alone_has_nobody_to_disagree_with() -> None:
    check_ranks(Mesh(), replace(PLAN, batches=PLAN.batches[:1]), [replace(good()[0], digests=())])


def test_a_group_has_what_its_poorest_rank_has() -> None:
    rich = echo_worker.EchoWorker.description
    poor = replace(rich, num_slots=3, num_pages=(9, 2), num_parameters=1, rank=1)
    merged = merge_descriptions(Mesh(tp=2), [rich, poor])
    assert merged == replace(rich, num_slots=3, num_pages=(7, 2))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "other"),
        ("vocab_size", 31),
        ("gamma_max", 7),
        ("page_size", 32),
        ("cache_groups", ("target",)),
        ("dtype", "bfloat16"),
        ("numerics", "reference"),
    ],
)
def test_ranks_that_loaded_different_things_are_named_with_the_field(field: str, value: object) -> None:
    first = echo_worker.EchoWorker.description
    others = [first, replace(first, **{field: value})]  # type: ignore[arg-type]
    with pytest.raises(LoadError, match=rf"^rank 1 \(dp 1, tp 0\) has {field} .*, rank 0 \(dp 0, tp 0\) has "):
        merge_descriptions(Mesh(dp=2), others)
