"""Plans, results, settings and descriptions survive the wire; what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import echo_worker
from hypothesis import given
from hypothesis import strategies as st

from outrider.v1 import worker_pb2
from workers import wire
from workers.plan import (
    LoadError,
    NewSequence,
    StalePlan,
    StepPlan,
    StepResult,
    StepTimings,
    WorkerLost,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
unit = st.floats(0, 1, width=32)
seconds = st.floats(0, 1e6)
logit_gaps = st.floats(0, width=32)


def rows(elements: st.SearchStrategy, n: int) -> st.SearchStrategy:
    return st.lists(elements, min_size=n, max_size=n).map(tuple)


def tokens(most: int) -> st.SearchStrategy:
    return st.lists(u32, max_size=most).map(tuple)


new_sequences = st.builds(
    NewSequence,
    slot=u32,
    epoch=u64,
    uid=u64,
    prompt=tokens(6),
    tables=st.lists(tokens(4), max_size=2).map(tuple),
    temperature=st.floats(0, 100, width=32),
    top_k=u32,
    top_p=unit,
    min_p=unit,
    seed=u64,
    coupled=st.booleans(),
    stop_token_ids=tokens(3),
    max_tokens=u32,
)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    n = draw(st.integers(0, 4))
    return StepPlan(
        step_id=draw(u64),
        epoch=draw(u64),
        admitted=draw(st.lists(new_sequences, max_size=2).map(tuple)),
        released_slots=draw(tokens(3)),
        slots=draw(rows(u32, n)),
        epochs=draw(rows(u64, n)),
        num_known=draw(rows(u32, n)),
        num_drafts=draw(rows(st.integers(0, 8), n)),
        samples=draw(rows(st.booleans(), n)),
        max_committed=draw(rows(u32, n)),
        gamma=draw(st.integers(0, 8)),
        verify_budget=draw(u32),
        feed_drafter=draw(st.booleans()),
        report_margins=draw(st.booleans()),
    )


@st.composite
def answered_plans(draw: st.DrawFn) -> tuple[StepPlan, StepResult]:
    plan = draw(plans())
    n = len(plan.slots)
    emitted = draw(rows(tokens(9), n))
    return plan, StepResult(
        step_id=plan.step_id,
        epoch=plan.epoch,
        emitted=emitted,
        drafted=tuple(draw(rows(u32, d)) for d in plan.num_drafts),
        num_admitted=draw(rows(u32, n)),
        num_accepted=draw(rows(u32, n)),
        margins=tuple(draw(rows(logit_gaps, len(run))) for run in emitted) if plan.report_margins else (),
        timings=draw(st.builds(StepTimings, **dict.fromkeys(StepTimings.__slots__, seconds))),
    )


def over_the_wire(result: StepResult, plan: StepPlan) -> StepResult:
    data = wire.result_to_wire(result, plan).SerializeToString()
    return wire.result_from_wire(worker_pb2.StepResult.FromString(data), plan)


@given(plans())
def test_a_plan_arrives_as_it_left(plan: StepPlan) -> None:
    data = wire.plan_to_wire(plan).SerializeToString()
    assert wire.plan_from_wire(worker_pb2.StepPlan.FromString(data)) == plan


@given(answered_plans())
def test_a_result_arrives_as_it_left(answered: tuple[StepPlan, StepResult]) -> None:
    plan, result = answered
    assert over_the_wire(result, plan) == result


@given(answered_plans(), st.sampled_from(["step_id", "epoch"]))
def test_the_result_of_another_plan_is_refused(answered: tuple[StepPlan, StepResult], name: str) -> None:
    plan, result = answered
    other = replace(result, **{name: (getattr(result, name) + 1) % 2**64})
    with pytest.raises(StalePlan, match="was answered by"):
        over_the_wire(other, plan)


ONE_ROW = StepPlan(
    step_id=1, epoch=1, slots=(1,), epochs=(1,), num_known=(1,), num_drafts=(2,), samples=(True,), max_committed=(5,)
)
ITS_RESULT = StepResult(step_id=1, epoch=1, emitted=((7, 8),), drafted=((7, 9),), num_admitted=(2,), num_accepted=(1,))


@pytest.mark.parametrize("column", ["emitted", "drafted", "num_admitted", "num_accepted"])
def test_a_column_of_the_wrong_length_does_not_leave_the_worker(column: str) -> None:
    with pytest.raises(ValueError, match="for 1 sequences"):
        wire.result_to_wire(replace(ITS_RESULT, **{column: ()}), ONE_ROW)


def test_drafts_that_do_not_match_their_count_do_not_leave_the_worker() -> None:
    with pytest.raises(ValueError, match="waiting drafts"):
        wire.result_to_wire(replace(ITS_RESULT, drafted=((7,),)), ONE_ROW)


@pytest.mark.parametrize("margins", [(), ((0.5,),), ((0.5, 0.5), ())])
def test_margins_that_do_not_match_the_emitted_tokens_do_not_leave_the_worker(
    margins: tuple[tuple[float, ...], ...],
) -> None:
    with pytest.raises(ValueError, match="margins do not fit"):
        wire.result_to_wire(replace(ITS_RESULT, margins=margins), replace(ONE_ROW, report_margins=True))


def test_margins_that_nobody_asked_for_do_not_leave_the_worker() -> None:
    with pytest.raises(ValueError, match="not asked for"):
        wire.result_to_wire(replace(ITS_RESULT, margins=((0.5, 0.5),)), ONE_ROW)


@pytest.mark.parametrize("asked", [False, True])
def test_a_result_with_a_margin_too_many_is_refused_on_arrival(asked: bool) -> None:
    plan = replace(ONE_ROW, report_margins=asked)
    message = wire.result_to_wire(replace(ITS_RESULT, margins=((0.5, 0.5),) if asked else ()), plan)
    message.margins.append(0.5)
    with pytest.raises(ValueError, match="margins for 2 tokens"):
        wire.result_from_wire(message, plan)


@pytest.mark.parametrize("column", ["emitted", "drafted", "num_emitted", "num_admitted"])
def test_a_damaged_result_is_refused_on_arrival(column: str) -> None:
    message = wire.result_to_wire(ITS_RESULT, ONE_ROW)
    getattr(message, column).append(3)
    with pytest.raises(ValueError, match=r"do not fit|columns of"):
        wire.result_from_wire(message, ONE_ROW)


@pytest.mark.parametrize("kind", [StalePlan, LoadError])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_errors_of_the_contract_keep_their_kind_and_text(kind: type[Exception], text: str) -> None:
    error = wire.error_from_text(wire.error_to_text(kind(text)))
    assert type(error) is kind
    assert str(error) == text


def test_other_errors_become_a_lost_worker_that_names_them() -> None:
    message = wire.failure_to_wire(ZeroDivisionError("in layer 3"), ONE_ROW)
    with pytest.raises(WorkerLost, match=r"^ZeroDivisionError: in layer 3$"):
        wire.result_from_wire(message, ONE_ROW)


def test_a_text_that_utf8_cannot_hold_still_arrives() -> None:
    assert str(wire.error_from_text(wire.error_to_text(LoadError("file \udcff")))) == "file \\udcff"


def test_settings_and_description_survive_as_json() -> None:
    settings = echo_worker.settings(numerics="reference", threads=3)
    assert wire.settings_from_wire(wire.settings_to_wire(settings)) == settings
    description = echo_worker.EchoWorker.description
    assert wire.description_from_wire(wire.description_to_wire(description)) == description
