"""StepPlan, RankReport and load progress to protobuf and back. Pure functions; knows no channel and no torch.

Floats but times travel as float32; those of a new sequence are float32 in the public face too. A report is read with
its plan at hand and with its sender's place: the plan says how many sequences that rank's batch has and how many drafts
waited for each, so reports carry no such columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TypeVar

from pydantic import TypeAdapter

from configs.schema import WorkerSettings
from outrider.v1 import worker_pb2 as wire
from parallel.mesh import Mesh
from workers.plan import (
    BatchPlan,
    BatchResult,
    Calibration,
    CollectiveCount,
    CollectiveFailed,
    LoadError,
    Origin,
    RankEnd,
    RankReport,
    RanksDisagree,
    StalePlan,
    StepPlan,
    StepTimings,
    WorkerDescription,
    WorkerError,
    WorkerLost,
)
from workers.sequence_wire import logprobs_from_wire, logprobs_to_wire, sequence_from_wire, sequence_to_wire

_T = TypeVar("_T")

_DESCRIPTION = TypeAdapter(WorkerDescription)
_ERRORS: dict[str, type[WorkerError]] = {
    error.__name__: error for error in (StalePlan, LoadError, CollectiveFailed, RanksDisagree)
}


def encode_plan(plan: StepPlan) -> bytes:
    """A plan as it travels: the same bytes to every rank of a group."""
    return plan_to_wire(plan).SerializeToString()


def plan_to_wire(plan: StepPlan) -> wire.StepPlan:
    return wire.StepPlan(
        step_id=plan.step_id,
        epoch=plan.epoch,
        batches=[_batch_to_wire(batch) for batch in plan.batches],
        gamma=plan.gamma,
        feed_drafter=plan.feed_drafter,
        report_margins=plan.report_margins,
        calibration=wire.Calibration(
            version=plan.calibration.version, slopes=plan.calibration.slopes, offsets=plan.calibration.offsets
        ),
        min_survival=plan.min_survival,
    )


def plan_from_wire(message: wire.StepPlan) -> StepPlan:
    return StepPlan(
        step_id=message.step_id,
        epoch=message.epoch,
        batches=tuple(_batch_from_wire(batch) for batch in message.batches),
        gamma=message.gamma,
        feed_drafter=message.feed_drafter,
        report_margins=message.report_margins,
        calibration=Calibration(
            version=message.calibration.version,
            slopes=tuple(message.calibration.slopes),
            offsets=tuple(message.calibration.offsets),
        ),
        min_survival=message.min_survival,
    )


def report_to_wire(report: RankReport, plan: StepPlan, mesh: Mesh, rank: int) -> wire.RankReport:
    """Raises ValueError when the report does not fit the plan it answers, or the place of `rank` in `mesh`."""
    _check_report(report, plan, mesh, rank)
    timings = report.timings
    return wire.RankReport(
        step_id=report.step_id,
        epoch=report.epoch,
        batch=None if report.batch is None else _result_to_wire(report.batch),
        digests=report.digests,
        collectives=[
            wire.CollectiveCount(group=each.group, count=each.count, digest=each.digest) for each in report.collectives
        ],
        timings=wire.Timings(**{name: getattr(timings, name) for name in StepTimings.__slots__}),
    )


def report_from_wire(message: wire.RankReport, plan: StepPlan, mesh: Mesh, rank: int) -> RankReport:
    """The report of `rank` on `plan`. Raises the WorkerError the message carries, StalePlan when it answers another
    plan, and ValueError when it does not fit."""
    if message.error:
        raise error_from_text(message.error)
    if (message.step_id, message.epoch) != (plan.step_id, plan.epoch):
        raise StalePlan(
            f"step {plan.step_id} of epoch {plan.epoch} was answered by step {message.step_id} of epoch {message.epoch}"
        )
    batch = plan.batches[mesh.dp_rank(rank)]
    report = RankReport(
        step_id=message.step_id,
        epoch=message.epoch,
        batch=_result_from_wire(message.batch, plan, batch) if message.HasField("batch") else None,
        digests=tuple(message.digests),
        collectives=tuple(
            CollectiveCount(group=each.group, count=each.count, digest=each.digest) for each in message.collectives
        ),
        timings=StepTimings(**{name: getattr(message.timings, name) for name in StepTimings.__slots__}),
    )
    _check_report(report, plan, mesh, rank)
    return report


def failure_to_wire(error: BaseException, plan: StepPlan) -> wire.RankReport:
    """The answer to a plan that could not be executed."""
    return wire.RankReport(step_id=plan.step_id, epoch=plan.epoch, error=error_to_text(error))


def settings_to_wire(settings: WorkerSettings) -> wire.LoadRequest:
    return wire.LoadRequest(settings_json=settings.model_dump_json())


def settings_from_wire(message: wire.LoadRequest) -> WorkerSettings:
    """Raises pydantic.ValidationError when the other end has other settings than we know."""
    return WorkerSettings.model_validate_json(message.settings_json)


def description_to_wire(description: WorkerDescription) -> wire.LoadProgress:
    """The last frame of a load that went well."""
    return wire.LoadProgress(description_json=_DESCRIPTION.dump_json(description).decode())


def description_from_wire(message: wire.LoadProgress) -> WorkerDescription:
    return _DESCRIPTION.validate_json(message.description_json)


def error_to_text(error: BaseException) -> str:
    """`Kind: text`, or `Kind` alone. What cannot be encoded (a file name may hold it) is replaced."""
    kind, text = type(error).__name__, str(error)
    return (f"{kind}: {text}" if text else kind).encode(errors="backslashreplace").decode()


def error_from_text(text: str) -> WorkerError:
    """The error that `error_to_text` wrote. Kinds that are not of the contract become WorkerLost, named in its text."""
    kind, _, message = text.partition(": ")
    known = _ERRORS.get(kind)
    return WorkerLost(text) if known is None else known(message)


def _batch_to_wire(batch: BatchPlan) -> wire.BatchPlan:
    return wire.BatchPlan(
        admitted=[sequence_to_wire(sequence) for sequence in batch.admitted],
        released_slots=batch.released_slots,
        slots=batch.slots,
        sequence_epochs=batch.epochs,
        num_known=batch.num_known,
        num_drafts=batch.num_drafts,
        samples=batch.samples,
        max_committed=batch.max_committed,
        num_unfed=batch.num_unfed,
        verify_budget=batch.verify_budget,
        num_forced=batch.num_forced,
    )


def _batch_from_wire(message: wire.BatchPlan) -> BatchPlan:
    return BatchPlan(
        admitted=tuple(sequence_from_wire(sequence) for sequence in message.admitted),
        released_slots=tuple(message.released_slots),
        slots=tuple(message.slots),
        epochs=tuple(message.sequence_epochs),
        num_known=tuple(message.num_known),
        num_drafts=tuple(message.num_drafts),
        samples=tuple(message.samples),
        max_committed=tuple(message.max_committed),
        num_unfed=tuple(message.num_unfed),
        verify_budget=message.verify_budget,
        num_forced=tuple(message.num_forced),
    )


def _result_to_wire(result: BatchResult) -> wire.BatchResult:
    return wire.BatchResult(
        num_emitted=[len(tokens) for tokens in result.emitted],
        num_admitted=result.num_admitted,
        num_accepted=result.num_accepted,
        emitted=chain.from_iterable(result.emitted),
        drafted=chain.from_iterable(result.drafted),
        margins=chain.from_iterable(result.margins),
        scores=chain.from_iterable(result.scores),
        acceptance=chain.from_iterable(result.acceptance),
        origins=[origin.value for origin in result.origins],
        num_looked_up=result.num_looked_up,
        num_forbidden=result.num_forbidden,
        ends=[end.value for end in result.ends],
        problems=result.problems,
        logprobs=[logprobs_to_wire(tokens) for tokens in result.logprobs],
        prompt_logprobs=[logprobs_to_wire(tokens) for tokens in result.prompt_logprobs],
    )


def _result_from_wire(message: wire.BatchResult, plan: StepPlan, batch: BatchPlan) -> BatchResult:
    """Raises ValueError when flattened columns do not fit their counts."""
    if len(message.emitted) != sum(message.num_emitted) or len(message.drafted) != sum(batch.num_drafts):
        raise ValueError(f"step {plan.step_id}: the flattened tokens do not fit their counts")
    if len(message.margins) != (len(message.emitted) if plan.report_margins else 0):
        raise ValueError(f"step {plan.step_id}: {len(message.margins)} margins for {len(message.emitted)} tokens")
    if len(message.scores) != len(message.drafted):
        raise ValueError(f"step {plan.step_id}: {len(message.scores)} scores for {len(message.drafted)} drafts")
    if len(message.num_admitted) != len(message.num_accepted):
        raise ValueError(f"step {plan.step_id}: columns of unequal length say what was admitted and what accepted")
    reached = _num_reached(message.num_admitted, message.num_accepted)
    if len(message.acceptance) != sum(reached):
        raise ValueError(
            f"step {plan.step_id}: {len(message.acceptance)} acceptance probabilities for {sum(reached)} positions"
        )
    return BatchResult(
        emitted=_split(message.emitted, message.num_emitted),
        drafted=_split(message.drafted, batch.num_drafts),
        num_admitted=tuple(message.num_admitted),
        num_accepted=tuple(message.num_accepted),
        margins=_split(message.margins, message.num_emitted) if plan.report_margins else (),
        scores=_split(message.scores, batch.num_drafts),
        acceptance=_split(message.acceptance, reached),
        origins=tuple(Origin(origin) for origin in message.origins),
        num_looked_up=tuple(message.num_looked_up),
        num_forbidden=tuple(message.num_forbidden),
        ends=tuple(RankEnd(end) for end in message.ends),
        problems=tuple(message.problems),
        logprobs=tuple(logprobs_from_wire(tokens) for tokens in message.logprobs),
        prompt_logprobs=tuple(logprobs_from_wire(tokens) for tokens in message.prompt_logprobs),
    )


def _check_report(report: RankReport, plan: StepPlan, mesh: Mesh, rank: int) -> None:
    """Who leads answers with tokens and nobody else does; digests are for all sequences of the batch or for none."""
    if len(plan.batches) != mesh.dp:
        raise ValueError(f"step {plan.step_id}: {len(plan.batches)} batches for {mesh.dp} data-parallel ranks")
    batch = plan.batches[mesh.dp_rank(rank)]
    if mesh.leads(rank) != (report.batch is not None):
        wrong = "leads, but answered without tokens" if mesh.leads(rank) else "does not lead, but answered with tokens"
        raise ValueError(f"step {plan.step_id}: rank {rank} {wrong}")
    if len(report.digests) not in (0, len(batch.slots)):
        raise ValueError(f"step {plan.step_id}: {len(report.digests)} digests for {len(batch.slots)} sequences")
    if report.batch is not None:
        _check_columns(report.batch, plan, batch)


def _check_columns(result: BatchResult, plan: StepPlan, batch: BatchPlan) -> None:
    """A column of another length would hand tokens to the wrong sequence."""
    columns = (result.emitted, result.drafted, result.num_admitted, result.num_accepted)
    if any(len(column) != len(batch.slots) for column in columns):
        lengths = ", ".join(str(len(column)) for column in columns)
        raise ValueError(f"step {plan.step_id}: columns of {lengths} entries for {len(batch.slots)} sequences")
    optional = (result.origins, result.num_forbidden, result.ends, result.logprobs, result.prompt_logprobs)
    if any(len(column) not in (0, len(batch.slots)) for column in optional):
        raise ValueError(f"step {plan.step_id}: a column that may be left out has not an entry per sequence")
    looked_up = tuple(zip(result.origins, result.num_looked_up, batch.num_drafts, strict=False))
    if len(result.origins) != len(result.num_looked_up) or any(
        (origin is not Origin.DRAFTER) != (count > 0) or count > waiting for origin, count, waiting in looked_up
    ):
        raise ValueError(f"step {plan.step_id}: the counts of drafts that were looked up do not fit their origins")
    if len(result.problems) != sum(end is RankEnd.BROKEN for end in result.ends):
        raise ValueError(f"step {plan.step_id}: {len(result.problems)} problems do not fit the sequences that broke")
    _check_logprobs(result, plan, batch)
    drafted = tuple(len(tokens) for tokens in result.drafted)
    if drafted != batch.num_drafts:
        raise ValueError(f"step {plan.step_id}: the plan counts {batch.num_drafts} waiting drafts, the rank {drafted}")
    expected = tuple(len(tokens) for tokens in result.emitted) if plan.report_margins else ()
    if tuple(len(margins) for margins in result.margins) != expected:
        raise ValueError(f"step {plan.step_id}: the margins do not fit the emitted tokens, or were not asked for")
    if tuple(len(scores) for scores in result.scores) != drafted:
        raise ValueError(f"step {plan.step_id}: the scores do not fit the waiting drafts")
    reached = tuple(_num_reached(result.num_admitted, result.num_accepted))
    if tuple(len(shares) for shares in result.acceptance) != reached:
        raise ValueError(f"step {plan.step_id}: the acceptance probabilities do not fit the positions reached")


def _check_logprobs(result: BatchResult, plan: StepPlan, batch: BatchPlan) -> None:
    """Of every token of a run, or of none."""
    for told, emitted in zip(result.logprobs, result.emitted, strict=False):
        if told and tuple(each.token for each in told) != emitted:
            raise ValueError(f"step {plan.step_id}: the log-probabilities do not fit the emitted tokens")
    for told, known, samples in zip(result.prompt_logprobs, batch.num_known, batch.samples, strict=False):
        if told and len(told) != known - samples:
            raise ValueError(f"step {plan.step_id}: the log-probabilities do not fit the rows of the prompt")


def _num_reached(num_admitted: Iterable[int], num_accepted: Iterable[int]) -> list[int]:
    """How many positions of each sequence verification reached: the accepted drafts, and the one that fell."""
    return [min(accepted + 1, admitted) for admitted, accepted in zip(num_admitted, num_accepted, strict=True)]


def _split(flat: Iterable[_T], counts: Iterable[int]) -> tuple[tuple[_T, ...], ...]:
    entries = tuple(flat)
    parts: list[tuple[_T, ...]] = []
    start = 0
    for count in counts:
        parts.append(entries[start : start + count])
        start += count
    return tuple(parts)
