"""`outrider top`: figures from two statuses, the table of them, and looks by the clock."""

from __future__ import annotations

import asyncio
import io
import re
from dataclasses import replace

import pytest
from fakes.commands import closed_port, outrider_in_loop
from fakes.front import in_loop, request_for, serving
from rich.console import Console

from outrider.v1 import operator_pb2
from runtime.cli import console, top
from runtime.cli.rates import Prediction, Rates, StepTimes, rates_between
from runtime.cli.replicas import Answer, Failure
from runtime.cli.top import Reading, figures_of, picture, read, table_of, watch

BEFORE = {
    "steps": 10,
    "rounds": 40,
    "emitted": 100,
    "drafted_by_position": [40, 40, 0],
    "admitted_by_position": [40, 30, 0],
    "accepted_by_position": [30, 20, 0],
    "rank_s": 2.0,
    "target_s": 1.0,
    "draft_s": 0.5,
    "verify_s": 0.25,
    "commit_s": 0.125,
    "execute_s": 2.5,
    "host_s": 0.5,
    "errors": {"Overloaded": 2, "InvalidRequest": 3, "Unavailable": 4},
}
AFTER = {
    "steps": 14,
    "rounds": 56,
    "emitted": 132,
    "drafted_by_position": [56, 48, 0],
    "admitted_by_position": [54, 36, 0],
    "accepted_by_position": [42, 22, 0],
    "rank_s": 2.5,
    "target_s": 1.25,
    "draft_s": 0.625,
    "verify_s": 0.3125,
    "commit_s": 0.15625,
    "execute_s": 3.125,
    "host_s": 0.75,
    "errors": {"Overloaded": 7, "InvalidRequest": 4, "Unavailable": 4, "Forbidden": 1, "SlowReader": 0},
}
PLANNED_BEFORE = {
    "zero_budget_steps": 3,
    "predicted_steps": 8,
    "predicted_sum_s": 1.0,
    "measured_sum_s": 2.0,
    "error_sum_s": 0.5,
}
PLANNED_AFTER = {
    "zero_budget_steps": 4,
    "predicted_steps": 10,
    "predicted_sum_s": 1.25,
    "measured_sum_s": 2.5,
    "error_sum_s": 0.625,
    "profile": operator_pb2.PROFILE_STATE_OK,
    "gamma": 2,
    "budget": 7,
    "survival_by_position": [0.875, 0.5],
}
RATES = Rates(
    interval_s=2.0,
    tokens_per_s=16.0,
    tokens_per_pass=2.0,
    acceptance=(0.75, 0.25),
    admitted=20,
    accepted=14,
    steps=4,
    zero_budget_steps=1,
    prediction=Prediction(predicted_ms=125.0, measured_ms=250.0, error_ms=62.5),
    errors={"Overloaded": 5, "Forbidden": 1, "InvalidRequest": 1},
    step=StepTimes(total_ms=218.75, target_ms=62.5, draft_ms=31.25, verify_ms=15.625, commit_ms=7.8125, rest_ms=93.75),
)
GONE = Failure(address="b:2", message="UNAVAILABLE: gone [b]", code=console.EXIT_UNAVAILABLE)


def planning(uptime_s: float, counters: dict, speculation: dict) -> operator_pb2.GetStatusResponse:
    return status(uptime_s, counters, speculation=operator_pb2.SpeculationStatus(**speculation))


def status(uptime_s: float, counters: dict, **fields) -> operator_pb2.GetStatusResponse:
    return operator_pb2.GetStatusResponse(uptime_s=uptime_s, counters=operator_pb2.Counters(**counters), **fields)


def answer(value: operator_pb2.GetStatusResponse, address: str = "a:1") -> Answer:
    return Answer(address=address, value=value)


def busy(uptime_s: float = 7.0, counters: dict | None = None, **policy: object) -> operator_pb2.GetStatusResponse:
    pools = [
        [operator_pb2.PoolStatus(group="target", pages_used=used, pages_total=50)]
        + [operator_pb2.PoolStatus(group="drafter", pages_used=1, pages_total=8)]
        for used in (10, 15)
    ]
    return status(
        uptime_s,
        AFTER | {"restarts": 2, "rank_losses": 3, "outage_s": 4.5} if counters is None else counters,
        state=operator_pb2.SERVER_STATE_DRAINING,
        waiting=4,
        open_calls=5,
        policy={"policy": {"fixed": {"gamma": 3}}, "revision": 9} | policy,
        speculation=operator_pb2.SpeculationStatus(**PLANNED_AFTER),
        batches=[
            operator_pb2.BatchStatus(running=n, slots_used=n, slots_total=4, pools=pool)
            for n, pool in zip((1, 2), pools, strict=True)
        ],
    )


def test_rates_are_differences_over_the_difference_of_uptime():
    before, after = planning(5.0, BEFORE, PLANNED_BEFORE), planning(7.0, AFTER, PLANNED_AFTER)
    assert rates_between(before, after) == RATES
    # A server that tells nothing of its planner has the rest all the same.
    silent = replace(RATES, zero_budget_steps=0, prediction=None)
    assert rates_between(status(5.0, BEFORE), status(7.0, AFTER)) == silent


def test_an_idle_interval_has_a_rate_of_nothing_and_no_ratios():
    rates = rates_between(status(5.0, BEFORE), status(5.5, BEFORE))
    assert rates == Rates(
        interval_s=0.5,
        tokens_per_s=0.0,
        tokens_per_pass=None,
        acceptance=(),
        admitted=0,
        accepted=0,
        steps=0,
        zero_budget_steps=0,
        step=None,
        prediction=None,
    )


def test_passes_without_drafts_have_no_acceptance():
    later = BEFORE | {"rounds": 44, "emitted": 104}
    rates = rates_between(status(5.0, BEFORE), status(6.0, later))
    assert (rates.tokens_per_pass, rates.acceptance) == (1.0, ())


def test_a_list_by_position_may_grow():
    longer = AFTER | {"drafted_by_position": [56, 48, 0, 8], "accepted_by_position": [42, 22, 0, 2]}
    assert rates_between(status(5.0, BEFORE), status(7.0, longer)).acceptance == (0.75, 0.25, 0.25)


def test_rounding_makes_no_negative_time():
    later = AFTER | {"rank_s": 3.0}
    assert rates_between(status(5.0, BEFORE), status(7.0, later)).step.rest_ms == 0.0


@pytest.mark.parametrize("uptime_s", [5.0, 4.9, 0.0])
def test_a_server_with_less_uptime_has_started_anew(uptime_s):
    assert rates_between(status(5.0, BEFORE), status(uptime_s, AFTER)) is None


@pytest.mark.parametrize("name", sorted(BEFORE.keys() - {"errors"}))
def test_a_counter_that_falls_says_that_the_server_started_anew(name):
    value = BEFORE[name]
    lower = (
        [value[0] - 1, *value[1:]] if isinstance(value, list) else value - 0.0625 if name[-2:] == "_s" else value - 1
    )
    assert rates_between(status(5.0, BEFORE), status(7.0, AFTER | {name: lower})) is None


def test_a_list_by_position_that_got_shorter_has_fallen():
    shorter = AFTER | {"accepted_by_position": [42]}
    assert rates_between(status(5.0, BEFORE), status(7.0, shorter)) is None


def test_figures_of_a_busy_server():
    figures = dict(figures_of(Reading(outcome=answer(busy()), rates=RATES)))
    assert figures == {
        "state": "draining",
        "policy": "fixed, gamma 3",
        "revision": "9",
        "running": "3",
        "waiting": "4",
        "open calls": "5",
        "errors": "Overloaded 5, Forbidden 1, ...",
        "tokens/s": "16.0",
        "tokens per pass": "2.00",
        "acceptance by position": "0.75 0.25",
        "gamma, budget": "2, 7",
        "survival by position": "0.88 0.50",
        "accepted / admitted": "14 / 20 (70%)",
        "zero-budget steps": "1 / 4 (25%)",
        "profile": "ok",
        "slots": "3 / 8 (38%)",
        "pages: target": "25 / 100 (25%)",
        "pages: drafter": "2 / 16 (12%)",
        "ms per step": "218.75",
        "  target": "62.50",
        "  draft": "31.25",
        "  verify": "15.62",
        "  commit": "7.81",
        "  link and host": "93.75",
        "ms predicted": "125.00",
        "  measured": "250.00",
        "  mean error": "62.50 (25%)",
        "restarts": "2",
        "rank losses": "3",
        "  without ranks": "4.5 s",
    }
    silent = busy()
    silent.ClearField("speculation")
    rows = {name for name, _ in figures_of(Reading(outcome=answer(silent), rates=RATES))}
    assert set(figures) - rows == {
        *("gamma, budget", "survival by position", "accepted / admitted", "zero-budget steps", "profile"),
        *("ms predicted", "  measured", "  mean error"),
    }


def test_a_dynamic_policy_that_runs_as_something_else_is_marked_and_the_reason_stands_below():
    classes = [{"priority": priority, "policy": {"off": {}}} for priority in (-1, 4)]
    dynamic = busy(policy={"dynamic": {}}, fallback="no profile [here]", classes=classes)
    readings = [Reading(outcome=answer(dynamic), rates=RATES), Reading(outcome=answer(busy(), "b:2"), rates=RATES)]
    figures = dict(figures_of(readings[0]))
    assert (figures["policy"], figures["priorities"]) == ("dynamic (as fixed)", "-1, 4")
    assert "priorities" not in dict(figures_of(readings[1]))
    text = text_of(picture(readings))
    assert text.splitlines()[-1] == "a:1: dynamic runs as a fixed draft length: no profile [here]"
    assert text.count("runs as a fixed") == 1


def test_without_rates_the_rows_stay_and_have_no_figures():
    with_rates, without = (dict(figures_of(Reading(outcome=answer(busy()), rates=rates))) for rates in (RATES, None))
    assert list(without) == list(with_rates)
    assert {name for name in without if without[name] == "–"} == {
        *("tokens/s", "tokens per pass", "acceptance by position", "errors"),
        *("ms per step", "  target", "  draft", "  verify", "  commit", "  link and host"),
        *("accepted / admitted", "zero-budget steps", "ms predicted", "  measured", "  mean error"),
    }


def text_of(renderable) -> str:
    console_ = Console(file=io.StringIO(), width=100)
    console_.print(renderable)
    return console_.file.getvalue()


def test_the_table_has_a_column_per_server_also_for_those_that_are_gone():
    table = table_of([Reading(outcome=GONE, rates=None), Reading(outcome=answer(busy(), "[fe80::1]:1"), rates=RATES)])
    lines = text_of(table).splitlines()
    assert lines[0].split() == ["b:2", "[fe80::1]:1"]
    assert lines[1].split() == ["state", "unreachable", "draining"]
    assert re.split(r"  +", lines[2].strip()) == ["policy", "–", "fixed, gamma 3"]
    assert lines[-2].split() == ["rank", "losses", "–", "3"]
    assert len(lines) == 31


@pytest.mark.parametrize("width", [40, 80, 200])
def test_names_of_rows_are_whole_at_any_width(width):
    reading = Reading(outcome=Answer(address="127.0.0.1:50051", value=status(7.0, AFTER)), rates=None)
    table = table_of([reading, reading, reading])
    printed = io.StringIO()
    Console(file=printed, width=width).print(table)
    assert "acceptance by position" in printed.getvalue()


def test_the_picture_says_why_a_server_is_missing():
    text = text_of(picture([Reading(outcome=GONE, rates=None)]))
    assert "b:2: UNAVAILABLE: gone [b]" in text
    refused = Failure(address="b:2", message="UNIMPLEMENTED: no", code=console.EXIT_REFUSED)
    assert dict(figures_of(Reading(outcome=refused, rates=None))) == {"state": "refuses"}


class Time:
    """Seconds that pass in sleep, and in polls by `poll_s`."""

    def __init__(self, poll_s: float) -> None:
        self.now_s = 50.0
        self.poll_s = poll_s
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


async def looks(outcomes: list, time: Time, interval_s: float = 1.0) -> list[Reading]:
    """One reading per outcome, of a single server."""
    script = iter(outcomes)

    async def poll():
        time.now_s += time.poll_s
        return [next(script)]

    stream = watch(poll, interval_s, clock=time.clock, sleep=time.sleep)
    found = [(await anext(stream))[0] for _ in outcomes]
    await stream.aclose()
    return found


def test_looks_are_an_interval_apart_whatever_a_poll_takes():
    time = Time(poll_s=0.25)
    asyncio.run(looks([answer(status(n, BEFORE)) for n in range(4)], time))
    assert time.slept == [0.75] * 3
    slow = Time(poll_s=1.5)
    asyncio.run(looks([answer(status(n, BEFORE)) for n in range(4)], slow))
    assert slow.slept == [0.0] * 3


def test_a_server_that_comes_back_has_rates_from_its_second_look_on():
    answers = [answer(status(uptime_s, AFTER), GONE.address) for uptime_s in (9.0, 10.0)]
    lives = [answer(status(5.0, BEFORE), GONE.address), answer(status(7.0, AFTER), GONE.address), GONE, GONE, *answers]
    found = asyncio.run(looks(lives, Time(poll_s=0.0)))
    assert [reading.outcome for reading in found] == lives
    assert found[1].rates == replace(RATES, zero_budget_steps=0, prediction=None)
    assert [reading.rates is None for reading in found] == [True, False, True, True, True, False]


def test_an_answer_is_compared_with_one_of_the_same_server():
    assert read(answer(status(7.0, AFTER)), None).rates is None
    assert read(GONE, status(5.0, BEFORE)).rates is None


@pytest.fixture
def outrider(monkeypatch):
    return outrider_in_loop(monkeypatch)


@in_loop
async def test_without_a_terminal_it_prints_one_table_of_one_interval_and_ends(outrider):
    async with serving(steps_by_itself=False) as front:
        call = front.client.call(request_for(max_tokens=100_000))
        await front.engine.until(lambda: len(front.engine.live) == 1)
        printing = asyncio.create_task(outrider("top", "--interval-s", "0.1", "--address", front.address))
        while not printing.done():
            front.engine.step() if front.engine.live else None
            await asyncio.sleep(0.02)
        result = await printing
        call.cancel()
    assert result.exit_code == 0, result.output
    rows = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in result.stdout.splitlines()[1:])
    assert rows["tokens per pass"] == "3.00"
    assert rows["acceptance by position"] == "1.00 1.00"
    assert float(rows["tokens/s"]) > 0
    assert (rows["ms per step"], rows["target"], rows["link and host"]) == ("625.00", "125.00", "375.00")
    assert "\x1b" not in result.output


@pytest.mark.parametrize(("options", "tables"), [(("--once",), 1), (("--count", "3"), 3)])
@in_loop
async def test_as_many_tables_as_asked_for(outrider, options, tables):
    async with serving() as front:
        result = await outrider("top", "--interval-s", "0.1", *options, "--address", front.address)
    assert result.stdout.count("restarts") == tables


@in_loop
async def test_the_live_view_ends_after_its_intervals_and_says_what_is_missing(outrider, monkeypatch):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
    monkeypatch.setattr(top, "OUT", terminal)
    with closed_port() as dead:
        async with serving() as front:
            result = await outrider(
                *("top", "--interval-s", "0.1", "--count", "2", "--address", front.address, "--address", dead)
            )
    drawn = terminal.file.getvalue()
    assert drawn.count("restarts") >= 3, "the first look and two intervals"
    assert "unreachable" in drawn
    assert f"{dead}: UNAVAILABLE" in drawn
    assert result.exit_code == console.EXIT_UNAVAILABLE
    assert result.stderr.startswith(f"error: {dead}: UNAVAILABLE: ")
