"""Which part a slow step is blamed on, and how often that is said."""

from __future__ import annotations

import logging

import pytest
from fakes.moments import step_record, timings

from runtime.observe.records import StepRecord
from runtime.observe.slow_steps import SlowSteps, cause_of, waited_s

QUICK = {"target_s": 0.004, "verify_s": 0.001, "commit_s": 0.001, "draft_s": 0.002}


@pytest.mark.parametrize("part", ["target", "verify", "commit", "draft"])
def test_the_longest_part_of_a_rank_is_the_cause(part: str) -> None:
    cause = cause_of(step_record(timings(**QUICK | {f"{part}_s": 2.0})))
    assert (cause.part, cause.rank, round(cause.took_s, 3)) == (part, 0, 2.0)


@pytest.mark.parametrize(("part", "time"), [("planning", "plan_s"), ("booking", "book_s"), ("link", "execute_s")])
def test_the_hosts_parts_are_causes_too(part: str, time: str) -> None:
    cause = cause_of(step_record(timings(**QUICK), **{time: 1.5}))
    assert (cause.part, cause.rank) == (part, None)


def test_where_all_wait_for_one_rank_its_own_work_is_the_cause() -> None:
    waiting = timings(target_s=2.1, verify_s=0.01, collective_s=2.0)
    busy = timings(target_s=2.0, verify_s=0.01, collective_s=0.05)
    record = step_record(waiting, busy, waiting)
    assert (cause_of(record).part, cause_of(record).rank) == ("target", 1)
    assert waited_s(record) == pytest.approx(1.95)


def test_where_nobody_works_collectives_are_the_cause() -> None:
    ranks = [timings(target_s=2.0, collective_s=1.9), timings(target_s=2.0, collective_s=1.8)]
    assert cause_of(step_record(*ranks)).part == "collectives"


def slow(**more: object) -> StepRecord:
    return step_record(timings(**QUICK | {"target_s": 2.0}), **more)  # type: ignore[arg-type]


def test_a_line_a_second_and_the_next_one_counts_those_between(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [50.0]
    steps = SlowSteps(1000.0, lambda: now_s[0])
    for _ in range(5):
        steps.note(slow())
    assert len(caplog.records) == 1
    steps.note(step_record(timings(**QUICK)))
    now_s[0] += 1.0
    steps.note(slow())
    assert len(caplog.records) == 2
    assert "4 more slow steps" in caplog.messages[1]
    assert "more slow steps" not in caplog.messages[0]
    assert caplog.records[0].levelno == logging.WARNING
    assert caplog.records[0].cause == "target"  # type: ignore[attr-defined]
    assert caplog.records[0].target_ms == 2000  # type: ignore[attr-defined]


def test_quick_steps_are_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    steps = SlowSteps(1000.0)
    steps.note(step_record(timings(**QUICK)))
    assert caplog.records == []


def test_first_steps_and_larger_ones_than_ever_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    steps = SlowSteps(1000.0, lambda: now_s[0])
    for record in (slow(is_first=True), slow(known=(400, 1)), slow(known=(300, 1))):
        steps.note(record)
        now_s[0] += 2
    first, larger, smaller = caplog.messages
    assert "the first that these ranks serve" in first
    assert "most rows" in larger
    assert "step of" not in smaller
    assert "most rows" not in smaller
    assert caplog.records[1].prompt_rows == 400  # type: ignore[attr-defined]


def test_who_waited_for_whom_is_said(caplog: pytest.LogCaptureFixture) -> None:
    waiting, busy = timings(target_s=2.1, collective_s=2.0), timings(target_s=2.1, collective_s=0.0)
    SlowSteps(1000.0).note(step_record(waiting, busy))
    assert "target on rank 1" in caplog.text
    assert "other ranks waited up to 2000 ms for rank 1" in caplog.text
