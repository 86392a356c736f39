"""Plans, reports, settings and descriptions survive the wire; what does not fit is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fakes import echo_worker
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.v1 import worker_pb2
from parallel.mesh import ONE_RANK, Mesh
from workers import wire
from workers.demands import TokenLogprob
from workers.plan import (
    BatchPlan,
    BatchResult,
    Calibration,
    CollectiveCount,
    NewSequence,
    Origin,
    RankEnd,
    RankReport,
    StalePlan,
    StepPlan,
    StepTimings,
    WorkerLost,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
unit = st.floats(0, 1, width=32)
seconds = st.floats(0, 1e6)
logit_gaps = st.floats(0, width=32)
reals = st.floats(-30, 30, width=32)


def rows(elements: st.SearchStrategy, n: int) -> st.SearchStrategy:
    return st.lists(elements, min_size=n, max_size=n).map(tuple)


def tokens(most: int) -> st.SearchStrategy:
    return st.lists(u32, max_size=most).map(tuple)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)

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

logprobs = st.floats(max_value=0, allow_nan=False, width=32)


def told_of(run: st.SearchStrategy) -> st.SearchStrategy:
    """Log-probabilities of the tokens of a run, with as many others each."""

    def tell(ids: tuple[int, ...], num_top: int) -> st.SearchStrategy:
        others = rows(st.tuples(u32, logprobs), num_top)
        return st.tuples(
            *[st.builds(TokenLogprob, token=st.just(token), logprob=logprobs, top=others) for token in ids]
        )

    return st.tuples(run, st.integers(0, 2)).flatmap(lambda both: tell(*both))


@st.composite
def batch_plans(draw: st.DrawFn) -> BatchPlan:
    n = draw(st.integers(0, 3))
    num_drafts = draw(rows(st.integers(0, 8), n))
    return BatchPlan(
        admitted=draw(st.lists(new_sequences, max_size=2).map(tuple)),
        released_slots=draw(tokens(3)),
        slots=draw(rows(u32, n)),
        epochs=draw(rows(u64, n)),
        num_known=draw(rows(st.integers(1, 4) | u32.filter(bool), n)),
        num_drafts=num_drafts,
        num_forced=draw(st.just(()) | st.tuples(*[st.integers(0, count) for count in num_drafts])),
        samples=draw(rows(st.booleans(), n)),
        max_committed=draw(rows(u32, n)),
        num_unfed=draw(rows(u32, n)),
        verify_budget=draw(u32),
    )


calibrations = st.integers(0, 3).flatmap(
    lambda count: st.builds(Calibration, version=u64, slopes=rows(reals, count), offsets=rows(reals, count))
)

plans = st.builds(
    StepPlan,
    step_id=u64,
    epoch=u64,
    batches=st.lists(batch_plans(), max_size=3).map(tuple),
    gamma=st.integers(0, 8),
    feed_drafter=st.booleans(),
    report_margins=st.booleans(),
    calibration=calibrations,
    min_survival=unit,
)

timings = st.builds(StepTimings, **{**dict.fromkeys(StepTimings.__slots__, seconds), "expert_rows": u64})

counts = st.builds(CollectiveCount, group=st.sampled_from(["tp.0", "tp.1", "world"]), count=u32, digest=u32)


@st.composite
def left_out(draw: st.DrawFn, batch: BatchPlan, emitted: tuple[tuple[int, ...], ...]) -> dict[str, object]:
    """Columns of a result that may be left out, each there or not."""
    n = len(batch.slots)
    ends = draw(st.just(()) | rows(st.sampled_from(RankEnd), n))
    columns: dict[str, object] = {
        "ends": ends,
        "problems": draw(rows(texts, ends.count(RankEnd.BROKEN))),
        "num_forbidden": draw(st.just(()) | rows(u32, n)),
    }
    if draw(st.booleans()):
        looked_up = tuple(draw(st.integers(0, waiting)) for waiting in batch.num_drafts)
        columns["num_looked_up"] = looked_up
        columns["origins"] = tuple(
            draw(st.sampled_from([Origin.PREDICTION, Origin.NGRAM])) if count else Origin.DRAFTER for count in looked_up
        )
    if draw(st.booleans()):
        columns["logprobs"] = draw(st.tuples(*[st.just(()) | told_of(st.just(run)) for run in emitted]))
    if draw(st.booleans()):
        counts = [known - samples for known, samples in zip(batch.num_known, batch.samples, strict=True)]
        columns["prompt_logprobs"] = draw(
            st.tuples(*[told_of(rows(u32, count)) if count < 5 else st.just(()) for count in counts])
        )
    return columns


@st.composite
def answers(draw: st.DrawFn) -> tuple[RankReport, StepPlan, Mesh, int]:
    """A report, the plan it answers, the mesh, and whose report it is."""
    plan = draw(plans.filter(lambda plan: plan.batches))
    mesh = Mesh(dp=len(plan.batches), tp=draw(st.integers(1, 3)))
    rank = draw(st.integers(0, mesh.size - 1))
    batch = plan.batches[mesh.dp_rank(rank)]
    n = len(batch.slots)
    emitted = draw(rows(tokens(9), n))
    admitted = tuple(draw(st.integers(0, count)) for count in batch.num_drafts)
    accepted = tuple(draw(st.integers(0, count)) for count in admitted)
    result = BatchResult(
        emitted=emitted,
        drafted=tuple(draw(rows(u32, d)) for d in batch.num_drafts),
        num_admitted=admitted,
        num_accepted=accepted,
        margins=tuple(draw(rows(logit_gaps, len(run))) for run in emitted) if plan.report_margins else (),
        scores=tuple(draw(rows(reals, d)) for d in batch.num_drafts),
        acceptance=tuple(draw(rows(unit, min(a + 1, d))) for a, d in zip(accepted, admitted, strict=True)),
        **draw(left_out(batch, emitted)),
    )
    report = RankReport(
        step_id=plan.step_id,
        epoch=plan.epoch,
        batch=result if mesh.leads(rank) else None,
        digests=draw(rows(u32, n)) if draw(st.booleans()) else (),
        collectives=draw(st.lists(counts, max_size=2).map(tuple)),
        timings=draw(timings),
    )
    return report, plan, mesh, rank


def over_the_wire(report: RankReport, plan: StepPlan, mesh: Mesh = ONE_RANK, rank: int = 0) -> RankReport:
    data = wire.report_to_wire(report, plan, mesh, rank).SerializeToString()
    return wire.report_from_wire(worker_pb2.RankReport.FromString(data), plan, mesh, rank)


@given(plans)
def test_a_plan_arrives_as_it_left(plan: StepPlan) -> None:
    assert wire.plan_from_wire(worker_pb2.StepPlan.FromString(wire.encode_plan(plan))) == plan


@given(answers())
def test_a_report_arrives_as_it_left(answer: tuple[RankReport, StepPlan, Mesh, int]) -> None:
    assert over_the_wire(*answer) == answer[0]


@settings(max_examples=settings.default.max_examples // 4)
@given(answers(), st.sampled_from(["step_id", "epoch"]))
def test_the_report_on_another_plan_is_refused(answer: tuple[RankReport, StepPlan, Mesh, int], name: str) -> None:
    report, plan, mesh, rank = answer
    other = replace(report, **{name: (getattr(report, name) + 1) % 2**64})
    with pytest.raises(StalePlan, match="was answered by"):
        over_the_wire(other, plan, mesh, rank)


ONE_BATCH = BatchPlan(
    slots=(1,), epochs=(1,), num_known=(1,), num_drafts=(2,), samples=(True,), max_committed=(5,), num_unfed=(0,)
)
ONE_ROW = StepPlan(step_id=1, epoch=1, batches=(ONE_BATCH,))
ITS_RESULT = BatchResult(
    emitted=((7, 8),),
    drafted=((7, 9),),
    num_admitted=(2,),
    num_accepted=(1,),
    scores=((0.5, -2.0),),
    acceptance=((1.0, 0.25),),
)
ITS_REPORT = RankReport(step_id=1, epoch=1, batch=ITS_RESULT, digests=(5,))


def to_wire(plan: StepPlan = ONE_ROW, **changes: object) -> worker_pb2.RankReport:
    """The report on `plan` with some columns of its batch changed."""
    return wire.report_to_wire(replace(ITS_REPORT, batch=replace(ITS_RESULT, **changes)), plan, ONE_RANK, 0)


@pytest.mark.parametrize(("rank", "batch", "text"), [(0, None, "without tokens"), (1, ITS_RESULT, "with tokens")])
def test_only_who_leads_answers_with_tokens(rank: int, batch: BatchResult | None, text: str) -> None:
    report, pair = replace(ITS_REPORT, batch=batch), Mesh(tp=2)
    with pytest.raises(ValueError, match=f"rank {rank} .*{text}"):
        wire.report_to_wire(report, ONE_ROW, pair, rank)
    message = wire.report_to_wire(report, ONE_ROW, pair, 1 - rank)
    with pytest.raises(ValueError, match=f"rank {rank} .*{text}"):
        wire.report_from_wire(message, ONE_ROW, pair, rank)


def test_a_report_is_read_with_the_batch_of_its_own_rank() -> None:
    plan, mesh = replace(ONE_ROW, batches=(BatchPlan(), ONE_BATCH)), Mesh(dp=2)
    assert over_the_wire(ITS_REPORT, plan, mesh, 1) == ITS_REPORT
    with pytest.raises(ValueError, match="1 digests for 0 sequences"):
        wire.report_to_wire(ITS_REPORT, plan, mesh, 0)


def test_a_plan_for_another_mesh_is_not_answered() -> None:
    with pytest.raises(ValueError, match="1 batches for 2 data-parallel ranks"):
        wire.report_to_wire(ITS_REPORT, ONE_ROW, Mesh(dp=2), 0)


def test_digests_are_for_all_sequences_or_for_none() -> None:
    with pytest.raises(ValueError, match="2 digests for 1 sequences"):
        wire.report_to_wire(replace(ITS_REPORT, digests=(1, 2)), ONE_ROW, ONE_RANK, 0)


@pytest.mark.parametrize("column", ["emitted", "drafted", "num_admitted", "num_accepted"])
def test_a_column_of_the_wrong_length_does_not_leave_the_worker(column: str) -> None:
    with pytest.raises(ValueError, match="for 1 sequences"):
        to_wire(**{column: ()})


def test_drafts_that_do_not_match_their_count_do_not_leave_the_worker() -> None:
    with pytest.raises(ValueError, match="waiting drafts"):
        to_wire(drafted=((7,),))


@pytest.mark.parametrize("margins", [(), ((0.5,),), ((0.5, 0.5), ())])
def test_margins_that_do_not_match_the_emitted_tokens_do_not_leave_the_worker(
    margins: tuple[tuple[float, ...], ...],
) -> None:
    with pytest.raises(ValueError, match="margins do not fit"):
        to_wire(replace(ONE_ROW, report_margins=True), margins=margins)


def test_margins_that_nobody_asked_for_do_not_leave_the_worker() -> None:
    with pytest.raises(ValueError, match="not asked for"):
        to_wire(margins=((0.5, 0.5),))


@pytest.mark.parametrize("asked", [False, True])
def test_a_result_with_a_margin_too_many_is_refused_on_arrival(asked: bool) -> None:
    plan = replace(ONE_ROW, report_margins=asked)
    message = to_wire(plan, margins=((0.5, 0.5),) if asked else ())
    message.batch.margins.append(0.5)
    with pytest.raises(ValueError, match="margins for 2 tokens"):
        wire.report_from_wire(message, plan, ONE_RANK, 0)


@pytest.mark.parametrize("scores", [(), ((0.5,),), ((0.5, 0.5, 0.5),), ((0.5, 0.5), ())])
def test_scores_that_do_not_match_the_waiting_drafts_do_not_leave_the_worker(
    scores: tuple[tuple[float, ...], ...],
) -> None:
    with pytest.raises(ValueError, match="scores do not fit"):
        to_wire(scores=scores)


@pytest.mark.parametrize(
    ("admitted", "accepted", "reached"), [(0, 0, 0), (1, 0, 1), (1, 1, 1), (2, 0, 1), (2, 1, 2), (2, 2, 2)]
)
def test_acceptance_is_told_of_reached_positions_only(admitted: int, accepted: int, reached: int) -> None:
    counts = {"num_admitted": (admitted,), "num_accepted": (accepted,)}
    to_wire(**counts, acceptance=((0.5,) * reached,))
    for wrong in {0, 1, 2, 3} - {reached}:
        with pytest.raises(ValueError, match="positions reached"):
            to_wire(**counts, acceptance=((0.5,) * wrong,))


@pytest.mark.parametrize(("column", "text"), [("scores", "3 scores for 2 drafts"), ("acceptance", "3 acceptance .* 2")])
def test_a_result_with_a_number_too_many_is_refused_on_arrival(column: str, text: str) -> None:
    message = to_wire()
    getattr(message.batch, column).append(0.5)
    with pytest.raises(ValueError, match=text):
        wire.report_from_wire(message, ONE_ROW, ONE_RANK, 0)


@pytest.mark.parametrize("column", ["emitted", "drafted", "num_emitted", "num_admitted", "num_accepted"])
def test_a_damaged_result_is_refused_on_arrival(column: str) -> None:
    message = to_wire()
    getattr(message.batch, column).append(3)
    with pytest.raises(ValueError, match=r"do not fit|columns of"):
        wire.report_from_wire(message, ONE_ROW, ONE_RANK, 0)


SURE = (TokenLogprob(token=7, logprob=0.0), TokenLogprob(token=8, logprob=-math.inf))


def test_a_sure_token_and_an_impossible_one_have_a_log_probability() -> None:
    report = replace(ITS_REPORT, batch=replace(ITS_RESULT, logprobs=(SURE,)))
    assert over_the_wire(report, ONE_ROW) == report


@pytest.mark.parametrize("told", [SURE[:1], SURE[::-1], (*SURE, SURE[0])], ids=["too few", "others", "too many"])
def test_log_probabilities_of_other_tokens_than_were_emitted_do_not_leave_the_worker(
    told: tuple[TokenLogprob, ...],
) -> None:
    with pytest.raises(ValueError, match="do not fit the emitted tokens"):
        to_wire(logprobs=(told,))


@pytest.mark.parametrize("count", [1, 3])
def test_log_probabilities_of_another_part_of_a_prompt_do_not_leave_the_worker(count: int) -> None:
    chunk = replace(ONE_BATCH, num_known=(3,), num_drafts=(0,))
    plan = replace(ONE_ROW, batches=(chunk,))
    alone = {"emitted": ((7,),), "drafted": ((),), "num_admitted": (0,), "num_accepted": (0,)}
    none = {"scores": ((),), "acceptance": ((),)}
    to_wire(plan, **alone, **none, prompt_logprobs=(SURE,))
    with pytest.raises(ValueError, match="do not fit the rows of the prompt"):
        to_wire(plan, **alone, **none, prompt_logprobs=((SURE[0],) * count,))


@pytest.mark.parametrize("column", ["num_forbidden", "ends", "logprobs", "prompt_logprobs"])
def test_a_column_that_may_be_left_out_is_whole_or_not_there(column: str) -> None:
    entry = {"num_forbidden": 0, "ends": RankEnd.NONE}.get(column, ())
    to_wire(**{column: (entry,)})
    with pytest.raises(ValueError, match="that may be left out"):
        to_wire(**{column: (entry, entry)})


@pytest.mark.parametrize(
    ("origins", "counts"),
    [
        ((Origin.NGRAM,), ()),
        ((), (1,)),
        ((Origin.NGRAM,), (0,)),
        ((Origin.DRAFTER,), (1,)),
        ((Origin.PREDICTION,), (100,)),
    ],
)
def test_counts_of_what_was_looked_up_fit_their_origins(origins: tuple[Origin, ...], counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="drafts that were looked up do not fit"):
        to_wire(origins=origins, num_looked_up=counts)


def test_a_problem_without_a_sequence_that_broke_does_not_leave_the_worker() -> None:
    with pytest.raises(ValueError, match="1 problems do not fit"):
        to_wire(problems=("no such rule",))
    to_wire(ends=(RankEnd.BROKEN,), problems=("no such rule",))
    with pytest.raises(ValueError, match="0 problems do not fit"):
        to_wire(ends=(RankEnd.BROKEN,))


@pytest.mark.parametrize("column", ["origins", "ends"])
def test_a_kind_that_is_not_of_the_contract_is_refused_on_arrival(column: str) -> None:
    message = to_wire()
    getattr(message.batch, column).append(99)
    with pytest.raises(ValueError, match="99"):
        wire.report_from_wire(message, ONE_ROW, ONE_RANK, 0)


def test_other_errors_become_a_lost_worker_that_names_them() -> None:
    message = wire.failure_to_wire(ZeroDivisionError("in layer 3"), ONE_ROW)
    with pytest.raises(WorkerLost, match=r"^ZeroDivisionError: in layer 3$"):
        wire.report_from_wire(message, ONE_ROW, ONE_RANK, 0)


def test_settings_and_description_survive_as_json() -> None:
    settings = echo_worker.settings(numerics="reference", threads=3, rank=1)
    assert wire.settings_from_wire(wire.settings_to_wire(settings)) == settings
    description = echo_worker.EchoWorker.description
    assert wire.description_from_wire(wire.description_to_wire(description)) == description
