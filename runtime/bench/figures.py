"""From what was recorded of a cell to its figures. Pure; knows no client and no output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise

from runtime.bench import document, drafting
from runtime.bench.completion import Completion
from runtime.bench.counters import DraftCounts, MemoryUse, PlanCounts, PlanMoment, ServerCounts, peak
from runtime.bench.lengths import RoundCounts, count_rounds
from runtime.bench.load import Slot
from runtime.bench.percentiles import percentile

NOTHING_PLANNED = PlanCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request of a cell. due_s: when it was to be sent, on the clock of its completion."""

    due_s: float
    max_tokens: int
    completion: Completion

    @property
    def token_frames(self) -> tuple[tuple[float, int], ...]:
        """Moment and number of tokens of each frame that brought some."""
        return tuple((frame.at_s, frame.num_tokens) for frame in self.completion.frames if frame.num_tokens)

    @property
    def first_token_s(self) -> float:
        return self.token_frames[0][0] - self.due_s

    @property
    def request_s(self) -> float:
        return self.completion.frames[-1].at_s - self.due_s

    @property
    def frame_gaps_s(self) -> list[float]:
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.token_frames)]

    @property
    def token_gaps_s(self) -> list[float]:
        """A frame's gap, divided over its tokens; one entry per token after those of the first frame."""
        return [
            (later - earlier) / number
            for (earlier, _), (later, number) in pairwise(self.token_frames)
            for _ in range(number)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun:
    """What one cell left: its requests in order of their prompts, the server's counts, memory samples (one at least),
    and plans sampled with them.

    elapsed_s: from the start of the load to the end of the last request.
    fallback: why the policy, if it is dynamic, ran as a fixed draft length at the end of the load.
    followed: per record, tokens as recorded before the first that differs; () where nothing was recorded.
    readings: requests that reported their rounds, under the same load just before; () but in a first repeat.
    warmup: others that ran just before. measured_anew: times that ranks were lost in it, and it began again.
    """

    slot: Slot
    elapsed_s: float
    records: tuple[Record, ...]
    counts: ServerCounts
    memory: tuple[MemoryUse, ...]
    plans: PlanCounts = NOTHING_PLANNED
    moments: tuple[PlanMoment, ...] = ()
    fallback: str = ""
    followed: tuple[int, ...] = ()
    readings: tuple[Record, ...] = ()
    warmup: tuple[Record, ...] = ()
    measured_anew: int = 0


def figures_of(runs: Sequence[CellRun], limits: document.Limits) -> document.Figures:
    """Figures of repeats taken together. They are of one policy and one load."""
    records = [record for run in runs for record in run.records]
    before = [record for run in runs for record in (*run.readings, *run.warmup)]
    done = [record for record in records if not record.completion.failure]
    counts = sum((run.counts for run in runs), ServerCounts())
    elapsed_s = sum(run.elapsed_s for run in runs)
    num_tokens = sum(len(record.completion.tokens) for record in done)
    received = sum(len(record.completion.tokens) for record in records)
    # The pass of the prompt's last chunk commits one token; the others are decode passes.
    passes = sum(record.completion.num_passes - 1 for record in done)
    return document.Figures(
        elapsed_s=elapsed_s,
        requests=len(records),
        finished=len(done),
        failures=_failures(records),
        failures_before=_failures(before),
        failure_texts=_failure_texts([*records, *before]),
        finishes=dict(sorted(Counter(record.completion.finish for record in done).items())),
        rates=document.Rates(
            tokens_per_s=num_tokens / elapsed_s,
            requests_per_s=len(done) / elapsed_s,
            requests_within_limits_per_s=sum(keeps(record, limits) for record in done) / elapsed_s,
        ),
        latencies=_latencies(done),
        decode_passes=passes,
        tokens_per_pass=(num_tokens - len(done)) / passes if passes else None,
        drafts=drafting.Drafts(
            drafted=list(counts.drafted_by_position),
            admitted=list(counts.admitted_by_position),
            accepted=list(counts.accepted_by_position),
        ),
        origins=_origins(done),
        work=_work(runs, counts),
        time_per_token=_time_split(counts),
        steps=counts.steps,
        overhead_per_step_ms=counts.overhead_s / counts.steps * 1e3 if counts.steps else None,
        memory=_memory([use for run in runs for use in run.memory]),
        recording=_agreement(runs),
        measured_anew=sum(run.measured_anew for run in runs),
        tokens_of_others=counts.emitted - received,
    )


def _agreement(runs: Sequence[CellRun]) -> document.Agreement | None:
    pairs = [
        (len(record.completion.tokens), followed)
        for run in runs
        if run.followed
        for record, followed in zip(run.records, run.followed, strict=True)
        if not record.completion.failure
    ]
    if not pairs:
        return None
    num_tokens = sum(length for length, _ in pairs)
    return document.Agreement(
        compared=len(pairs),
        identical=sum(length == followed for length, followed in pairs),
        followed_share=sum(followed for _, followed in pairs) / num_tokens if num_tokens else None,
    )


def _failures(records: Iterable[Record]) -> dict[str, int]:
    return dict(sorted(Counter(one.completion.failure for one in records if one.completion.failure).items()))


def _failure_texts(records: Iterable[Record]) -> dict[str, str]:
    """What the server said first, by code."""
    texts: dict[str, str] = {}
    for record in records:
        if record.completion.failure:
            texts.setdefault(record.completion.failure, record.completion.failure_text)
    return dict(sorted(texts.items()))


def keeps(record: Record, limits: document.Limits) -> bool:
    """Whether a finished request kept all limits. One without a second frame of tokens has no gaps to keep."""
    gaps = record.token_gaps_s
    found = (
        (record.first_token_s, limits.first_token_ms),
        (sum(gaps) / len(gaps) if gaps else 0.0, limits.token_gap_ms),
        (record.request_s, limits.request_ms),
    )
    return all(limit_ms is None or seconds * 1e3 <= limit_ms for seconds, limit_ms in found)


def spread(values: Iterable[float]) -> document.Spread:
    found = sorted(values)
    if not found:
        return document.Spread(count=0, mean=None, p50=None, p90=None, p99=None)
    p50, p90, p99 = (percentile(found, share) for share in (0.5, 0.9, 0.99))
    return document.Spread(count=len(found), mean=sum(found) / len(found), p50=p50, p90=p90, p99=p99)


def _latencies(done: Sequence[Record]) -> document.Latencies:
    def milliseconds(values: Iterable[float]) -> document.Spread:
        return spread(value * 1e3 for value in values)

    return document.Latencies(
        first_token_ms=milliseconds(record.first_token_s for record in done),
        token_gap_ms=milliseconds(chain.from_iterable(record.token_gaps_s for record in done)),
        frame_gap_ms=milliseconds(chain.from_iterable(record.frame_gaps_s for record in done)),
        request_ms=milliseconds(record.request_s for record in done),
        schedule_lag_ms=milliseconds(record.completion.sent_s - record.due_s for record in done),
    )


def _origins(done: Sequence[Record]) -> drafting.Origins:
    sums = sum((record.completion.drafts for record in done), DraftCounts())
    predicted = drafting.DraftUse(
        drafted=sums.predicted_drafted, admitted=sums.predicted_admitted, accepted=sums.predicted_accepted
    )
    ngram = drafting.DraftUse(drafted=sums.ngram_drafted, admitted=sums.ngram_admitted, accepted=sums.ngram_accepted)
    return drafting.Origins(
        drafter=drafting.DraftUse(
            drafted=sums.drafted - predicted.drafted - ngram.drafted,
            admitted=sums.admitted - predicted.admitted - ngram.admitted,
            accepted=sums.accepted - predicted.accepted - ngram.accepted,
        ),
        prediction=predicted,
        ngram=ngram,
        forbidden=sums.forbidden,
    )


def _work(runs: Sequence[CellRun], counts: ServerCounts) -> drafting.Work:
    """counts: those of the runs together."""
    plans = sum((run.plans for run in runs), NOTHING_PLANNED)
    steps, predicted = sum(plans.steps_by_gamma), plans.predicted_steps
    drawn = sum(gamma * number for gamma, number in enumerate(plans.steps_by_gamma))
    return drafting.Work(
        steps_by_gamma=list(plans.steps_by_gamma),
        gamma_mean=drawn / steps if steps else None,
        budget_sum=plans.budget_sum,
        budget_per_step=plans.budget_sum / steps if steps else None,
        drafted=sum(counts.drafted_by_position),
        admitted=sum(counts.admitted_by_position),
        accepted=sum(counts.accepted_by_position),
        rollback_tokens=plans.rollback_tokens,
        zero_budget_steps=plans.zero_budget_steps,
        explored_steps=plans.explored_steps,
        predicted_steps=predicted,
        predicted_ms=plans.predicted_sum_s / predicted * 1e3 if predicted else None,
        measured_ms=plans.measured_sum_s / predicted * 1e3 if predicted else None,
        error_ms=plans.error_sum_s / predicted * 1e3 if predicted else None,
        fallback=next((run.fallback for run in runs if run.fallback), ""),
    )


def series_of(moments: Sequence[PlanMoment]) -> document.Series:
    return document.Series(
        at_s=[moment.at_s for moment in moments],
        gamma=[moment.gamma for moment in moments],
        budget=[moment.budget for moment in moments],
        predicted_ms=[moment.predicted_s * 1e3 for moment in moments],
        measured_ms=[moment.measured_s * 1e3 for moment in moments],
    )


def lengths_of(runs: Sequence[CellRun]) -> drafting.Lengths | None:
    """Of the readings of repeats of one policy and one load; None where none are among them, and where the policy has
    no one length."""
    gamma = runs[0].slot.policy.num_drafts
    if gamma is None:
        return None
    readings = [record for run in runs for record in run.readings if not record.completion.failure]
    if not readings:
        return None
    return _lengths_part(count_rounds(((one.completion, one.max_tokens) for one in readings), gamma))


def _lengths_part(counts: RoundCounts) -> drafting.Lengths:
    return drafting.Lengths(
        gamma=counts.gamma,
        decode_passes=counts.passes,
        tokens_per_pass=_float(counts.tokens_per_pass),
        full_rounds=counts.full,
        near_limit_rounds=counts.near_limit,
        other_length_rounds=counts.other_length,
        accepted_prefixes=list(counts.prefixes),
        survival=[float(share) for share in counts.survival],
        tokens_per_full_round=_float(counts.tokens_per_full_round),
        by_survival=_float(counts.expected_by_survival),
        acceptance_rate=_float(counts.acceptance_rate),
        by_rate=_float(counts.expected_by_rate),
        rate_misleads=counts.rate_misleads,
    )


def _float(value: Fraction | None) -> float | None:
    return None if value is None else float(value)


def _time_split(counts: ServerCounts) -> document.TimeSplit | None:
    if not counts.emitted:
        return None

    def per_token(seconds: float) -> float:
        return seconds / counts.emitted * 1e3

    return document.TimeSplit(
        draft_ms=per_token(counts.draft_s),
        verify_ms=per_token(counts.target_s + counts.verify_s),
        state_ms=per_token(counts.commit_s),
        host_and_link_ms=per_token(counts.overhead_s),
        total_ms=per_token(counts.execute_s + counts.host_s),
    )


def _memory(samples: Sequence[MemoryUse]) -> document.Memory:
    most = peak(samples)
    return document.Memory(
        parameter_bytes=most.parameters,
        record_bytes=most.records,
        slot_bytes=most.slots,
        page_bytes=most.pages,
        total_bytes=most.total,
        samples=len(samples),
    )
