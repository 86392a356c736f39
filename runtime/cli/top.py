"""`outrider top`: what servers do at the moment, a column each, drawn anew every second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from runtime.cli.console import EXIT_UNAVAILABLE, EXIT_USAGE, OUT, fail, natural_width, run, show
from runtime.cli.options import Addresses, Timeout, checked_seconds
from runtime.cli.phrases import (
    NONE,
    by_position,
    duration,
    optional,
    policy_name,
    profile_state,
    ratio,
    server_state,
    use,
)
from runtime.cli.rates import Prediction, Rates, StepTimes, rates_between
from runtime.cli.replicas import Answer, Failure, Replicas, answers_of, finish, print_failures

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2

    Outcome = Answer[operator_pb2.GetStatusResponse] | Failure

TIMEOUT_S = 2.0
"""Shorter than elsewhere: a server that says nothing holds up the view of all."""

MAX_ERRORS = 2
"""Kinds of them in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at one server. rates: since the look before; None where that had no answer, or was of another life."""

    outcome: Outcome
    rates: Rates | None


def top(
    addresses: Addresses,
    interval_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds from one look to the next.", callback=checked_seconds)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table of one interval, and end.")] = False,
    count: Annotated[int | None, typer.Option(min=1, help="End after this many intervals.")] = None,
    timeout_s: Timeout = TIMEOUT_S,
) -> None:
    """Watch servers at work until Ctrl-C; where the output is no terminal, print one table.

    Rates are of the last interval; gamma and budget (the draft rows verified at most) are of its newest step. Tokens
    per pass are tokens emitted over passes that sampled, the first of a request among them, which verifies no draft.
    Errors are calls of any service that were answered with one, the most frequent first. Predictions are of the
    steps that the hardware profile has figures for. A step is split into what its slowest rank
    spent and the rest: link and host. A server that cannot be reached is asked again at every look.
    """
    if once and count not in (None, 1):
        fail("--once is --count 1; leave one out", EXIT_USAGE)
    run(_top(addresses, timeout_s, interval_s, count, is_live=OUT.is_terminal and not once))


async def _top(addresses: list[str], timeout_s: float, interval_s: float, count: int | None, *, is_live: bool) -> None:
    outcomes: list[Outcome] = []
    async with Replicas(addresses, timeout_s) as replicas:
        looks = watch(lambda: replicas.ask(lambda client: client.get_status()), interval_s)
        async with aclosing(looks):
            if is_live:
                outcomes = await _draw(looks, count)
            else:
                outcomes = await _print(looks, count or 1)
    finish(print_failures(outcomes))


async def watch(
    poll: Callable[[], Awaitable[Sequence[Outcome]]],
    interval_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncGenerator[list[Reading], None]:
    """Looks without end, one per interval or as fast as servers answer; the first has no rates.

    clock, sleep: in seconds.
    """
    last: dict[str, operator_pb2.GetStatusResponse] = {}
    while True:
        began_s = clock()
        outcomes = await poll()
        yield [read(outcome, last.get(outcome.address)) for outcome in outcomes]
        last = {answer.address: answer.value for answer in answers_of(outcomes)}
        await sleep(max(0.0, began_s + interval_s - clock()))


def read(outcome: Outcome, before: operator_pb2.GetStatusResponse | None) -> Reading:
    """before: the answer of the look before; None where there was none."""
    if isinstance(outcome, Failure) or before is None:
        return Reading(outcome=outcome, rates=None)
    return Reading(outcome=outcome, rates=rates_between(before, outcome.value))


async def _draw(looks: AsyncGenerator[list[Reading], None], count: int | None) -> list[Outcome]:
    """Draws each look over the one before, until Ctrl-C or after `count` intervals. Returns what the last one found."""
    number = 0
    try:
        with Live(console=OUT, auto_refresh=False) as live:
            async for readings in looks:
                live.update(picture(readings), refresh=True)
                if number == count:
                    return [reading.outcome for reading in readings]
                number += 1
    except asyncio.CancelledError:
        pass  # Ctrl-C: how one leaves
    return []


async def _print(looks: AsyncGenerator[list[Reading], None], count: int) -> list[Outcome]:
    """Prints one table per interval. Returns what the last look found."""
    await anext(looks)
    outcomes: list[Outcome] = []
    for _ in range(count):
        readings = await anext(looks)
        outcomes = [reading.outcome for reading in readings]
        if answers_of(outcomes):
            show(table_of(readings))
            for line in _fallbacks(readings):
                OUT.print(line, soft_wrap=True)
    return outcomes


def picture(readings: Sequence[Reading]) -> Group:
    """The table, and below it why a policy is not what it says, and why servers are missing."""
    failures = [reading.outcome for reading in readings if isinstance(reading.outcome, Failure)]
    lines = [Text(f"{failure.address}: {failure.message}", style="red", overflow="fold") for failure in failures]
    return Group(table_of(readings), *_fallbacks(readings), *lines)


def _fallbacks(readings: Sequence[Reading]) -> list[Text]:
    """One line per server on which dynamic runs as something else: too long for a column."""
    answers = answers_of(reading.outcome for reading in readings)
    return [
        Text(f"{answer.address}: dynamic runs as a fixed draft length: {answer.value.policy.fallback}", overflow="fold")
        for answer in answers
        if answer.value.policy.fallback
    ]


def table_of(readings: Sequence[Reading]) -> Table:
    """A column per server, a row per figure."""
    columns = [dict(figures_of(reading)) for reading in readings]
    names = _row_names(columns)
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for reading in readings:
        table.add_column(escape(reading.outcome.address), justify="right", no_wrap=True)
    for name in names:
        table.add_row(escape(name), *(escape(column.get(name, NONE)) for column in columns))
    # As wide as it is: a narrow terminal loses what is at the right, not the names of the rows.
    table.width = natural_width(table)
    return table


def _row_names(columns: Sequence[dict[str, str]]) -> list[str]:
    """Of all columns, in the order of the longest one; a server that cannot be reached has few."""
    longest = max(columns, key=len)
    return list(dict.fromkeys(name for column in (longest, *columns) for name in column))


_OF_RATES: tuple[tuple[str, Callable[[Rates], str]], ...] = (
    ("tokens/s", lambda rates: f"{rates.tokens_per_s:.1f}"),
    ("tokens per pass", lambda rates: optional(rates.tokens_per_pass, ".2f")),
    ("acceptance by position", lambda rates: by_position(rates.acceptance)),
)
_OF_STEP: tuple[tuple[str, Callable[[StepTimes], float]], ...] = (
    ("ms per step", lambda step: step.total_ms),
    ("  target", lambda step: step.target_ms),
    ("  draft", lambda step: step.draft_ms),
    ("  verify", lambda step: step.verify_ms),
    ("  commit", lambda step: step.commit_ms),
    ("  link and host", lambda step: step.rest_ms),
)
_OF_PREDICTION: tuple[tuple[str, Callable[[Prediction], str]], ...] = (
    ("ms predicted", lambda told: f"{told.predicted_ms:.2f}"),
    ("  measured", lambda told: f"{told.measured_ms:.2f}"),
    ("  mean error", lambda told: _with_share(told.error_ms, told.measured_ms)),
)


def _with_share(part_ms: float, whole_ms: float) -> str:
    """0.52 (4%)"""
    return f"{part_ms:.2f} ({optional(ratio(part_ms, whole_ms), '.0%')})"


def figures_of(reading: Reading) -> Iterator[tuple[str, str]]:
    """Names and figures of one server from top to bottom."""
    if isinstance(reading.outcome, Failure):
        yield "state", "unreachable" if reading.outcome.code == EXIT_UNAVAILABLE else "refuses"
        return
    status, rates = reading.outcome.value, reading.rates
    yield "state", server_state(status.state)
    yield "policy", policy_name(status.policy.policy) + (" (as fixed)" if status.policy.fallback else "")
    if status.policy.classes:
        yield "priorities", ", ".join(str(one.priority) for one in status.policy.classes)
    yield "revision", str(status.policy.revision)
    yield "running", str(sum(batch.running for batch in status.batches))
    yield "waiting", str(status.waiting)
    yield "open calls", str(status.open_calls)
    yield "errors", NONE if rates is None else _errors(rates)
    for name, say in _OF_RATES:
        yield name, NONE if rates is None else say(rates)
    if status.HasField("speculation"):
        yield from _speculation(status.speculation, rates)
    yield "slots", _slots(status)
    yield from _pages(status)
    step = None if rates is None else rates.step
    for name, spent_ms in _OF_STEP:
        yield name, NONE if step is None else f"{spent_ms(step):.2f}"
    if status.HasField("speculation"):
        prediction = None if rates is None else rates.prediction
        for name, tell in _OF_PREDICTION:
            yield name, NONE if prediction is None else tell(prediction)
    yield "restarts", str(status.counters.restarts)
    yield "rank losses", str(status.counters.rank_losses)
    yield "  without ranks", duration(status.counters.outage_s)


def _speculation(speculation: operator_pb2.SpeculationStatus, rates: Rates | None) -> Iterator[tuple[str, str]]:
    """What the planner chose for the newest step, and what became of its choices."""
    yield "gamma, budget", f"{speculation.gamma}, {speculation.budget}"
    yield "survival by position", by_position(speculation.survival_by_position)
    yield "accepted / admitted", NONE if rates is None else use(rates.accepted, rates.admitted)
    yield "zero-budget steps", NONE if rates is None else use(rates.zero_budget_steps, rates.steps)
    yield "profile", profile_state(speculation.profile)


def _errors(rates: Rates) -> str:
    """Overloaded 5, Forbidden 2, ..."""
    told = [f"{name} {count}" for name, count in islice(rates.errors.items(), MAX_ERRORS)]
    return ", ".join([*told, "..."] if len(rates.errors) > MAX_ERRORS else told) or "0"


def _slots(status: operator_pb2.GetStatusResponse) -> str:
    return use(sum(batch.slots_used for batch in status.batches), sum(batch.slots_total for batch in status.batches))


def _pages(status: operator_pb2.GetStatusResponse) -> Iterator[tuple[str, str]]:
    """One line per cache group, over all data-parallel ranks."""
    pools = [pool for batch in status.batches for pool in batch.pools]
    for group in dict.fromkeys(pool.group for pool in pools):
        own = [pool for pool in pools if pool.group == group]
        yield f"pages: {group}", use(sum(pool.pages_used for pool in own), sum(pool.pages_total for pool in own))
