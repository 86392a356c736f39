"""From one step's result to events: who committed what, counts, and why a sequence ended. Pure; knows no queue, ledger
or link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from runtime.events import TokenEvent
from runtime.request import Finish, FinishReason, Request, Round, StopParams, Usage
from workers.plan import BatchPlan, BatchResult, StalePlan, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One column of a batch beside its result; the fields are those of BatchPlan and BatchResult.

    dp_rank: whose batch it is; slots and epochs are this data-parallel rank's own.
    """

    dp_rank: int = 0
    slot: int
    epoch: int
    num_known: int
    num_drafts: int
    samples: bool
    drafted: tuple[int, ...]
    num_admitted: int
    num_accepted: int
    emitted: tuple[int, ...]
    margins: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    acceptance: tuple[float, ...] = ()


def outcomes(plan: StepPlan, result: StepResult) -> Iterator[Outcome]:
    """Columns of all batches of `plan` with what became of them. Raises StalePlan when the result answers another
    plan, before any of them is given."""
    if (result.step_id, result.epoch) != (plan.step_id, plan.epoch):
        raise StalePlan(
            f"step {plan.step_id} of epoch {plan.epoch} was answered by step {result.step_id} of epoch {result.epoch}"
        )
    if len(result.batches) != len(plan.batches):
        raise StalePlan(f"step {plan.step_id} has {len(plan.batches)} batches, its result {len(result.batches)}")
    pairs = list(zip(plan.batches, result.batches, strict=True))
    for dp_rank, (batch, found) in enumerate(pairs):
        _check_lengths(plan, dp_rank, batch, found)
    return (
        Outcome(
            dp_rank=dp_rank,
            slot=batch.slots[i],
            epoch=batch.epochs[i],
            num_known=batch.num_known[i],
            num_drafts=batch.num_drafts[i],
            samples=batch.samples[i],
            drafted=found.drafted[i],
            num_admitted=found.num_admitted[i],
            num_accepted=found.num_accepted[i],
            emitted=found.emitted[i],
            margins=found.margins[i] if plan.report_margins else (),
            scores=found.scores[i],
            acceptance=found.acceptance[i],
        )
        for dp_rank, (batch, found) in enumerate(pairs)
        for i in range(len(batch.slots))
    )


def _check_lengths(plan: StepPlan, dp_rank: int, batch: BatchPlan, result: BatchResult) -> None:
    columns: list[Sequence[object]] = [
        result.emitted,
        result.drafted,
        result.num_admitted,
        result.num_accepted,
        result.scores,
        result.acceptance,
    ]
    if plan.report_margins:
        columns.append(result.margins)
    if any(len(column) != len(batch.slots) for column in columns):
        lengths = [len(column) for column in columns]
        raise StalePlan(
            f"step {plan.step_id} has {len(batch.slots)} sequences on data-parallel rank {dp_rank}, "
            f"its result {lengths}"
        )


def settle(request: Request, usage: Usage, outcome: Outcome) -> TokenEvent:
    """The event of a pass that sampled. `usage` is that before the pass; the event carries the one after it.

    A sequence that has stop strings needs a verdict.

    Raises ValueError when counts contradict each other, margins are missing from a request that reports its rounds, or
    tokens follow a stop: the worker has clipped already.
    """
    num_trimmed = outcome.num_accepted + 1 - len(outcome.emitted)
    counts_fit = 0 <= outcome.num_accepted <= outcome.num_admitted <= outcome.num_drafts == len(outcome.drafted)
    if not counts_fit or not outcome.emitted or num_trimmed < 0:
        raise ValueError(
            f"request {request.uid}: {len(outcome.drafted)} drafts of {outcome.num_drafts}, "
            f"{outcome.num_admitted} admitted, {outcome.num_accepted} accepted, {len(outcome.emitted)} emitted"
        )
    usage = replace(
        usage,
        completion=usage.completion + len(outcome.emitted),
        rounds=usage.rounds + 1,
        drafted=usage.drafted + outcome.num_drafts,
        admitted=usage.admitted + outcome.num_admitted,
        accepted=usage.accepted + outcome.num_accepted,
        trimmed=usage.trimmed + num_trimmed,
    )
    assert usage.completion == usage.accepted + usage.rounds - usage.trimmed
    finish = finish_of(request.stopping, outcome.emitted, usage.completion)
    if finish is None and num_trimmed:
        raise ValueError(f"request {request.uid}: {num_trimmed} tokens were cut off and nothing ended it")
    return TokenEvent(
        uid=request.uid,
        tokens=outcome.emitted,
        usage=usage,
        rounds=(_round_of(request, outcome),) if request.report_rounds else (),
        finish=finish,
        needs_verdict=bool(request.stopping.stop_strings),
    )


def _round_of(request: Request, outcome: Outcome) -> Round:
    if len(outcome.margins) != len(outcome.emitted):
        raise ValueError(
            f"request {request.uid}: {len(outcome.margins)} margins for {len(outcome.emitted)} emitted tokens"
        )
    return Round(
        drafted=outcome.drafted,
        accepted=outcome.num_accepted,
        emitted=outcome.emitted,
        margins=outcome.margins,
    )


def finish_of(stopping: StopParams, emitted: tuple[int, ...], num_completed: int) -> Finish | None:
    """Why a sequence ends with the last of the newly `emitted` tokens; None while it goes on.

    num_completed: tokens emitted in all, the new ones among them. End of sequence goes before a stop token, a stop
    token before the length. Raises ValueError for tokens beyond an end.
    """
    stops = {*stopping.eos_token_ids, *stopping.stop_token_ids}
    if not stops.isdisjoint(emitted[:-1]) or num_completed > stopping.max_tokens:
        raise ValueError(f"tokens {emitted} run past a stop token or past max_tokens {stopping.max_tokens}")
    last = emitted[-1]
    if last in stopping.eos_token_ids:
        return Finish(reason=FinishReason.EOS)
    if last in stopping.stop_token_ids:
        return Finish(reason=FinishReason.STOP_TOKEN, stop_token_id=last)
    if num_completed == stopping.max_tokens:
        return Finish(reason=FinishReason.LENGTH)
    return None
