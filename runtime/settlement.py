"""From one step's result to events: who committed what, counts, and why a sequence ended. Pure; knows no queue, ledger
or link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from runtime.events import TokenEvent
from runtime.request import Finish, FinishReason, Request, Round, StopParams, Usage
from workers.demands import TokenLogprob
from workers.plan import BatchPlan, BatchResult, Origin, RankEnd, StalePlan, StepPlan, StepResult


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
    origin: Origin = Origin.DRAFTER
    num_looked_up: int = 0
    num_forbidden: int = 0
    end: RankEnd = RankEnd.NONE
    problem: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


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
            origin=found.origins[i] if found.origins else Origin.DRAFTER,
            num_looked_up=found.num_looked_up[i] if found.num_looked_up else 0,
            num_forbidden=found.num_forbidden[i] if found.num_forbidden else 0,
            end=found.ends[i] if found.ends else RankEnd.NONE,
            problem=_problem(found, i),
            logprobs=found.logprobs[i] if found.logprobs else (),
            prompt_logprobs=found.prompt_logprobs[i] if found.prompt_logprobs else (),
        )
        for dp_rank, (batch, found) in enumerate(pairs)
        for i in range(len(batch.slots))
    )


def _problem(found: BatchResult, column: int) -> str:
    """Problems have an entry per sequence that broke, in order."""
    if not found.ends or found.ends[column] is not RankEnd.BROKEN:
        return ""
    return found.problems[sum(end is RankEnd.BROKEN for end in found.ends[:column])]


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


def settle(
    request: Request, usage: Usage, outcome: Outcome, prompt_logprobs: Sequence[TokenLogprob] = ()
) -> TokenEvent:
    """The event of a pass that sampled. `usage` is that before the pass; the event carries the one after it.

    A sequence that has stop strings needs a verdict. prompt_logprobs: all that came with the passes up to this one; the
    first event tells them.

    Raises ValueError when counts contradict each other, margins are missing from a request that reports its rounds,
    log-probabilities from one that wants them, or tokens follow a stop: the worker has clipped already.
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
        forbidden=usage.forbidden + outcome.num_forbidden,
        **_by_origin(usage, outcome),
    )
    assert usage.completion == usage.accepted + usage.rounds - usage.trimmed
    finish = finish_of(request.stopping, outcome.emitted, usage.completion)
    if finish is None and outcome.end is RankEnd.CONSTRAINT:
        finish = Finish(reason=FinishReason.CONSTRAINT)
    if finish is None and num_trimmed:
        raise ValueError(f"request {request.uid}: {num_trimmed} tokens were cut off and nothing ended it")
    return TokenEvent(
        uid=request.uid,
        tokens=outcome.emitted,
        usage=usage,
        rounds=(_round_of(request, outcome),) if request.report.rounds else (),
        logprobs=_logprobs_of(request, outcome),
        prompt_logprobs=() if usage.rounds > 1 else _prompt_logprobs_of(request, prompt_logprobs),
        finish=finish,
        needs_verdict=bool(request.stopping.stop_strings),
    )


def _by_origin(usage: Usage, outcome: Outcome) -> dict[str, int]:
    """What is counted apart of drafts that were not the drafter's: those in front of its own."""
    name = {Origin.PREDICTION: "predicted", Origin.NGRAM: "ngram"}.get(outcome.origin)
    if name is None:
        return {}
    counts = {"drafted": outcome.num_drafts, "admitted": outcome.num_admitted, "accepted": outcome.num_accepted}
    return {
        f"{name}_{what}": getattr(usage, f"{name}_{what}") + min(outcome.num_looked_up, count)
        for what, count in counts.items()
    }


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


def _logprobs_of(request: Request, outcome: Outcome) -> tuple[TokenLogprob, ...]:
    if request.report.num_logprobs is None:
        return ()
    if tuple(each.token for each in outcome.logprobs) != outcome.emitted:
        raise ValueError(
            f"request {request.uid}: {len(outcome.logprobs)} log-probabilities do not fit the "
            f"{len(outcome.emitted)} emitted tokens"
        )
    return outcome.logprobs


def wants_prompt_logprobs(request: Request) -> bool:
    """Of the sequences behind one prompt the first tells of it."""
    return request.report.num_prompt_logprobs is not None and request.index == 0


def _prompt_logprobs_of(request: Request, told: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
    if not wants_prompt_logprobs(request):
        return ()
    if tuple(each.token for each in told) != request.prompt[1:]:
        raise ValueError(
            f"request {request.uid}: {len(told)} log-probabilities do not fit the {len(request.prompt) - 1} tokens "
            "behind the first of the prompt"
        )
    return tuple(told)


def finish_of(stopping: StopParams, emitted: tuple[int, ...], num_completed: int) -> Finish | None:
    """Why a sequence ends with the last of the newly `emitted` tokens; None while it goes on.

    num_completed: tokens emitted in all, the new ones among them. End of sequence goes before a stop token, a stop
    token before the length. Raises ValueError for tokens beyond an end.
    """
    stops = {*stopping.eos_token_ids, *stopping.stop_token_ids}
    if not stops.isdisjoint(emitted[:-1]) or num_completed > stopping.max_tokens:
        raise ValueError(
            f"{len(emitted)} tokens, {num_completed} in all, run past a stop token or past max_tokens "
            f"{stopping.max_tokens}"
        )
    last = emitted[-1]
    if last in stopping.eos_token_ids:
        return Finish(reason=FinishReason.EOS)
    if last in stopping.stop_token_ids:
        return Finish(reason=FinishReason.STOP_TOKEN, stop_token_id=last)
    if num_completed == stopping.max_tokens:
        return Finish(reason=FinishReason.LENGTH)
    return None
