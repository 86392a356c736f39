"""StepPlan, StepResult and load progress to protobuf and back. Pure functions; knows no channel and no torch.

Floats of a new sequence travel as float32, like those of the public face. A result is read with its plan at hand:
the plan says how many drafts waited for each sequence, so results carry no such column.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TypeVar

from pydantic import TypeAdapter

from configs.schema import WorkerSettings
from outrider.v1 import worker_pb2 as wire
from workers.plan import (
    LoadError,
    NewSequence,
    StalePlan,
    StepPlan,
    StepResult,
    StepTimings,
    WorkerDescription,
    WorkerError,
    WorkerLost,
)

_T = TypeVar("_T")

_DESCRIPTION = TypeAdapter(WorkerDescription)
_ERRORS: dict[str, type[WorkerError]] = {error.__name__: error for error in (StalePlan, LoadError)}


def plan_to_wire(plan: StepPlan) -> wire.StepPlan:
    return wire.StepPlan(
        step_id=plan.step_id,
        epoch=plan.epoch,
        admitted=[_sequence_to_wire(sequence) for sequence in plan.admitted],
        released_slots=plan.released_slots,
        slots=plan.slots,
        sequence_epochs=plan.epochs,
        num_known=plan.num_known,
        num_drafts=plan.num_drafts,
        samples=plan.samples,
        max_committed=plan.max_committed,
        gamma=plan.gamma,
        verify_budget=plan.verify_budget,
        feed_drafter=plan.feed_drafter,
        report_margins=plan.report_margins,
    )


def plan_from_wire(message: wire.StepPlan) -> StepPlan:
    return StepPlan(
        step_id=message.step_id,
        epoch=message.epoch,
        admitted=tuple(_sequence_from_wire(sequence) for sequence in message.admitted),
        released_slots=tuple(message.released_slots),
        slots=tuple(message.slots),
        epochs=tuple(message.sequence_epochs),
        num_known=tuple(message.num_known),
        num_drafts=tuple(message.num_drafts),
        samples=tuple(message.samples),
        max_committed=tuple(message.max_committed),
        gamma=message.gamma,
        verify_budget=message.verify_budget,
        feed_drafter=message.feed_drafter,
        report_margins=message.report_margins,
    )


def result_to_wire(result: StepResult, plan: StepPlan) -> wire.StepResult:
    """Raises ValueError when the result's columns do not fit the plan they answer."""
    _check_columns(result, plan)
    timings = result.timings
    return wire.StepResult(
        step_id=result.step_id,
        epoch=result.epoch,
        num_emitted=[len(tokens) for tokens in result.emitted],
        num_admitted=result.num_admitted,
        num_accepted=result.num_accepted,
        emitted=chain.from_iterable(result.emitted),
        drafted=chain.from_iterable(result.drafted),
        margins=chain.from_iterable(result.margins),
        total_s=timings.total_s,
        target_s=timings.target_s,
        verify_s=timings.verify_s,
        commit_s=timings.commit_s,
        draft_s=timings.draft_s,
    )


def result_from_wire(message: wire.StepResult, plan: StepPlan) -> StepResult:
    """The result of `plan`. Raises the WorkerError the message carries, StalePlan when it answers another plan, and
    ValueError when its columns do not fit."""
    if message.error:
        raise error_from_text(message.error)
    if (message.step_id, message.epoch) != (plan.step_id, plan.epoch):
        raise StalePlan(
            f"step {plan.step_id} of epoch {plan.epoch} was answered by step {message.step_id} of epoch {message.epoch}"
        )
    if len(message.emitted) != sum(message.num_emitted) or len(message.drafted) != sum(plan.num_drafts):
        raise ValueError(f"step {plan.step_id}: the flattened tokens do not fit their counts")
    if len(message.margins) != (len(message.emitted) if plan.report_margins else 0):
        raise ValueError(f"step {plan.step_id}: {len(message.margins)} margins for {len(message.emitted)} tokens")
    result = StepResult(
        step_id=message.step_id,
        epoch=message.epoch,
        emitted=_split(message.emitted, message.num_emitted),
        drafted=_split(message.drafted, plan.num_drafts),
        num_admitted=tuple(message.num_admitted),
        num_accepted=tuple(message.num_accepted),
        margins=_split(message.margins, message.num_emitted) if plan.report_margins else (),
        timings=StepTimings(
            total_s=message.total_s,
            target_s=message.target_s,
            verify_s=message.verify_s,
            commit_s=message.commit_s,
            draft_s=message.draft_s,
        ),
    )
    _check_columns(result, plan)
    return result


def failure_to_wire(error: BaseException, plan: StepPlan) -> wire.StepResult:
    """The answer to a plan that could not be executed."""
    return wire.StepResult(step_id=plan.step_id, epoch=plan.epoch, error=error_to_text(error))


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
    """The error that `error_to_text` wrote. Kinds but StalePlan and LoadError become WorkerLost, named in its text."""
    kind, _, message = text.partition(": ")
    known = _ERRORS.get(kind)
    return WorkerLost(text) if known is None else known(message)


def _sequence_to_wire(sequence: NewSequence) -> wire.NewSequence:
    return wire.NewSequence(
        slot=sequence.slot,
        sequence_epoch=sequence.epoch,
        uid=sequence.uid,
        prompt=sequence.prompt,
        tables=[wire.BlockTable(pages=pages) for pages in sequence.tables],
        temperature=sequence.temperature,
        top_k=sequence.top_k,
        top_p=sequence.top_p,
        min_p=sequence.min_p,
        seed=sequence.seed,
        coupled=sequence.coupled,
        stop_token_ids=sequence.stop_token_ids,
        max_tokens=sequence.max_tokens,
    )


def _sequence_from_wire(message: wire.NewSequence) -> NewSequence:
    return NewSequence(
        slot=message.slot,
        epoch=message.sequence_epoch,
        uid=message.uid,
        prompt=tuple(message.prompt),
        tables=tuple(tuple(table.pages) for table in message.tables),
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        coupled=message.coupled,
        stop_token_ids=tuple(message.stop_token_ids),
        max_tokens=message.max_tokens,
    )


def _check_columns(result: StepResult, plan: StepPlan) -> None:
    """A column of another length would hand tokens to the wrong sequence."""
    columns = (result.emitted, result.drafted, result.num_admitted, result.num_accepted)
    if any(len(column) != len(plan.slots) for column in columns):
        lengths = ", ".join(str(len(column)) for column in columns)
        raise ValueError(f"step {plan.step_id}: columns of {lengths} entries for {len(plan.slots)} sequences")
    drafted = tuple(len(tokens) for tokens in result.drafted)
    if drafted != plan.num_drafts:
        raise ValueError(f"step {plan.step_id}: the plan counts {plan.num_drafts} waiting drafts, the rank {drafted}")
    expected = tuple(len(tokens) for tokens in result.emitted) if plan.report_margins else ()
    if tuple(len(margins) for margins in result.margins) != expected:
        raise ValueError(f"step {plan.step_id}: the margins do not fit the emitted tokens, or were not asked for")


def _split(flat: Iterable[_T], counts: Iterable[int]) -> tuple[tuple[_T, ...], ...]:
    entries = tuple(flat)
    parts: list[tuple[_T, ...]] = []
    start = 0
    for count in counts:
        parts.append(entries[start : start + count])
        start += count
    return tuple(parts)
