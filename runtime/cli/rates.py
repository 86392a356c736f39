"""What a server did between two of its statuses. Pure; knows no clock but the server's own, and no terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from runtime.cli.phrases import acceptance, ratio

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2

_SUMS = ("steps", "rounds", "emitted", "trimmed", "submitted", "finished", "aborted", "failed", "refused")
_TIMES = ("rank_s", "target_s", "verify_s", "commit_s", "draft_s", "execute_s", "host_s")
_BY_POSITION = ("drafted_by_position", "admitted_by_position", "accepted_by_position")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Milliseconds per step.

    total_ms: from one plan to the next. rest_ms: of it what the slowest rank did not spend: link and host.
    The others: spent by the slowest rank.
    """

    total_ms: float
    target_ms: float
    draft_ms: float
    verify_ms: float
    commit_ms: float
    rest_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Milliseconds per step, over those that were predicted. error_ms: the mean of |predicted - measured|."""

    predicted_ms: float
    measured_ms: float
    error_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One interval of the server's uptime.

    tokens_per_pass: tokens emitted over passes that sampled, the first of a request among them, which verifies no
        draft. None where no pass did.
    acceptance: entry k is for draft k, from 0: the share of those drafted that stood. () where none was drafted.
    admitted, accepted: draft rows verified, and those that stood.
    zero_budget_steps: of `steps`, those in which drafts waited and none was verified.
    step: None where no step ran. prediction: None where none was predicted.
    errors: calls answered with one, by its name, the most frequent first; those that did not happen are left out.
    """

    interval_s: float
    tokens_per_s: float
    tokens_per_pass: float | None
    acceptance: tuple[float, ...]
    admitted: int
    accepted: int
    steps: int
    zero_budget_steps: int
    step: StepTimes | None
    prediction: Prediction | None
    errors: Mapping[str, int] = field(default_factory=dict)


def rates_between(before: operator_pb2.GetStatusResponse, after: operator_pb2.GetStatusResponse) -> Rates | None:
    """None where the two are not of one server's life: it has started anew since."""
    interval_s = after.uptime_s - before.uptime_s
    if interval_s <= 0 or _has_fallen(before.counters, after.counters):
        return None
    emitted = after.counters.emitted - before.counters.emitted
    drafted, admitted, accepted = (
        [late - early for early, late in _pairs(before.counters, after.counters, name)] for name in _BY_POSITION
    )
    return Rates(
        interval_s=interval_s,
        tokens_per_s=emitted / interval_s,
        tokens_per_pass=ratio(emitted, after.counters.rounds - before.counters.rounds),
        acceptance=acceptance(accepted, drafted),
        admitted=sum(admitted),
        accepted=sum(accepted),
        steps=after.counters.steps - before.counters.steps,
        zero_budget_steps=after.speculation.zero_budget_steps - before.speculation.zero_budget_steps,
        step=_step_times(before.counters, after.counters),
        prediction=_prediction(before.speculation, after.speculation),
        errors=_errors(before.counters, after.counters),
    )


def _has_fallen(before: operator_pb2.Counters, after: operator_pb2.Counters) -> bool:
    return any(getattr(after, name) < getattr(before, name) for name in (*_SUMS, *_TIMES)) or any(
        late < early for name in _BY_POSITION for early, late in _pairs(before, after, name)
    )


def _pairs(before: operator_pb2.Counters, after: operator_pb2.Counters, name: str) -> list[tuple[int, int]]:
    """By position, with zeros where one of the lists ends before the other."""
    return list(zip_longest(getattr(before, name), getattr(after, name), fillvalue=0))


def _errors(before: operator_pb2.Counters, after: operator_pb2.Counters) -> Mapping[str, int]:
    rises = {name: count - before.errors.get(name, 0) for name, count in after.errors.items()}
    names = sorted((name for name, rise in rises.items() if rise > 0), key=lambda name: (-rises[name], name))
    return {name: rises[name] for name in names}


def _step_times(before: operator_pb2.Counters, after: operator_pb2.Counters) -> StepTimes | None:
    num_steps = after.steps - before.steps
    if not num_steps:
        return None
    spent_ms = {name: 1000 * (getattr(after, name) - getattr(before, name)) / num_steps for name in _TIMES}
    total_ms = spent_ms["execute_s"] + spent_ms["host_s"]
    return StepTimes(
        total_ms=total_ms,
        target_ms=spent_ms["target_s"],
        draft_ms=spent_ms["draft_s"],
        verify_ms=spent_ms["verify_s"],
        commit_ms=spent_ms["commit_s"],
        rest_ms=max(0.0, total_ms - spent_ms["rank_s"]),
    )


def _prediction(before: operator_pb2.SpeculationStatus, after: operator_pb2.SpeculationStatus) -> Prediction | None:
    num_steps = after.predicted_steps - before.predicted_steps
    if num_steps <= 0:
        return None
    return Prediction(
        predicted_ms=1000 * (after.predicted_sum_s - before.predicted_sum_s) / num_steps,
        measured_ms=1000 * (after.measured_sum_s - before.measured_sum_s) / num_steps,
        error_ms=1000 * (after.error_sum_s - before.error_sum_s) / num_steps,
    )
