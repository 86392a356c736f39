"""Ranks of arithmetic admit as real ones do: their reports pass the wire, and budgets and confidence decide."""

from __future__ import annotations

import pytest
from fakes.arithmetic import score_of, true_token
from fakes.worker import FakeGroup, describe

from parallel.mesh import ONE_RANK
from workers import wire
from workers.plan import (
    IDENTITY,
    NUM_TEMPERATURE_CLASSES,
    BatchPlan,
    BatchResult,
    Calibration,
    NewSequence,
    RankReport,
    StepPlan,
)

GAMMA = 4
PROMPTS = ((1, 2, 3), (4, 5), (6,))


def newcomer(i: int) -> NewSequence:
    return NewSequence(
        slot=i + 1,
        epoch=i + 1,
        uid=i + 1,
        prompt=PROMPTS[i],
        tables=(tuple(range(1 + 4 * i, 5 + 4 * i)),) * 2,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        coupled=True,
        stop_token_ids=(),
        max_tokens=8,
    )


def first_round(calibration: Calibration = IDENTITY) -> FakeGroup:
    """Three sequences with GAMMA drafts each that wait, all of them right."""
    group = FakeGroup(describe(), accept=1.0)
    count = len(PROMPTS)
    batch = BatchPlan(
        admitted=tuple(newcomer(i) for i in range(count)),
        slots=(1, 2, 3),
        epochs=(1, 2, 3),
        num_known=tuple(map(len, PROMPTS)),
        num_drafts=(0,) * count,
        samples=(True,) * count,
        max_committed=(0,) * count,
        num_unfed=(0,) * count,
    )
    group.run(StepPlan(step_id=1, epoch=1, batches=(batch,), gamma=GAMMA, calibration=calibration))
    return group


def second_round(group: FakeGroup, *, floor: float = 0.0, **columns: object) -> BatchResult:
    fields = {
        "slots": (1, 2, 3),
        "epochs": (1, 2, 3),
        "num_known": (1, 1, 1),
        "num_drafts": (GAMMA,) * 3,
        "samples": (True,) * 3,
        "max_committed": tuple(map(len, PROMPTS)),
        "num_unfed": (0,) * 3,
    }
    plan = StepPlan(
        step_id=2,
        epoch=1,
        batches=(BatchPlan(**{**fields, **columns}),),
        gamma=GAMMA,
        min_survival=floor,  # type: ignore[arg-type]
    )
    (result,) = group.run(plan).batches
    report = RankReport(step_id=2, epoch=1, batch=result)
    assert wire.report_from_wire(wire.report_to_wire(report, plan, ONE_RANK, 0), plan, ONE_RANK, 0) == report
    return result


def test_scores_are_of_prompt_and_position_and_all_drafts_are_admitted_by_default() -> None:
    result = second_round(first_round())
    assert result.scores == tuple(tuple(score_of(p, 1 + j) for j in range(GAMMA)) for p in PROMPTS)
    assert result.num_admitted == result.num_accepted == (GAMMA,) * 3
    assert result.acceptance == ((1.0,) * GAMMA,) * 3
    assert result.emitted[0] == tuple(true_token(PROMPTS[0], 1 + j) for j in range(GAMMA + 1))


@pytest.mark.parametrize("budget", range(12))
def test_a_budget_admits_so_many_and_the_surest_first(budget: int) -> None:
    result = second_round(first_round(), verify_budget=budget)
    assert sum(result.num_admitted) == budget
    first_scores = {row[0]: n for row, n in zip(result.scores, result.num_admitted, strict=True)}
    assert budget == 0 or first_scores[max(first_scores)] > 0
    assert tuple(map(len, result.emitted)) == tuple(n + 1 for n in result.num_admitted)


def test_caps_forced_drafts_and_the_floor_are_kept() -> None:
    assert second_round(first_round(), num_drafts=(1, 0, 2)).num_admitted == (1, 0, 2)
    assert second_round(first_round(), num_forced=(2, 2, 2), verify_budget=6).num_admitted == (2, 2, 2)
    assert second_round(first_round(), floor=1.0).num_admitted == (0, 0, 0)
    assert second_round(first_round(), floor=1.0, num_forced=(0, 3, 0)).num_admitted == (0, 3, 0)


def test_confidence_follows_the_calibration_of_the_step_that_drafted() -> None:
    cells = NUM_TEMPERATURE_CLASSES * GAMMA
    # Of slope 0, all confidences of a position are alike: entries go by position, then uid.
    flat = Calibration(version=1, slopes=(0.0,) * cells, offsets=(1.0,) * cells)
    assert second_round(first_round(flat), verify_budget=4).num_admitted == (2, 1, 1)


@pytest.mark.parametrize(
    ("columns", "text"),
    [({"num_drafts": (GAMMA, 5, GAMMA)}, "the plan says 5"), ({"num_forced": (5, 0, 0)}, "more forced than drafted")],
)
def test_a_plan_of_drafts_that_do_not_wait_is_a_violation(columns: dict[str, object], text: str) -> None:
    group = first_round()
    with pytest.raises(AssertionError, match=text):
        second_round(group, **columns)  # type: ignore[arg-type]
    assert len(group.violations) == 1
