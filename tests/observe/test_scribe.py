"""The thread that writes records down: in order, without holding anybody up, and not for ever."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from fakes.engine_house import asynchronous
from fakes.moments import FINISHED, step_record, timings

from runtime.observe.records import RequestRecord, StepRecord
from runtime.observe.scribe import Scribe

WAIT_S = 10.0


class Book:
    """A writer. gate: what it waits for before each record; error: what it raises then."""

    def __init__(self, error: Exception | None = None) -> None:
        self.written: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.is_closed = False
        self._error = error

    def write_request(self, record: RequestRecord, ended_ns: int) -> None:
        self.begun.set()
        assert self.gate.wait(WAIT_S)
        if self._error is not None:
            raise self._error
        self.written.append(record.request_id)

    def write_step(self, record: StepRecord, ended_ns: int) -> None:
        self.written.append(f"step {record.plan.step_id}")

    def close(self) -> None:
        self.is_closed = True


@asynchronous
async def test_records_are_written_in_order_before_the_end() -> None:
    book = Book()
    scribe = Scribe([book])
    for number in range(50):
        scribe.note(replace(FINISHED, request_id=str(number)))
    scribe.note(step_record(timings(target_s=1.0), step_id=9))
    await scribe.close(WAIT_S)
    await scribe.close(WAIT_S)
    assert book.written == [*map(str, range(50)), "step 9"]
    assert book.is_closed
    scribe.note(FINISHED)
    assert len(book.written) == 51


@asynchronous
async def test_writers_are_closed_where_nothing_was_written() -> None:
    book = Book()
    await Scribe([book]).close(WAIT_S)
    assert book.is_closed


@asynchronous
async def test_a_writer_that_fails_is_mentioned_once_and_spares_the_others(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Book(KeyError("no")), Book()
    scribe = Scribe([bad, good])
    for _ in range(3):
        scribe.note(FINISHED)
    await scribe.close(WAIT_S)
    assert good.written == ["one"] * 3
    assert len([record for record in caplog.records if "Book failed" in record.message]) == 1


@asynchronous
async def test_what_comes_too_fast_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    book = Book()
    book.gate.clear()
    scribe = Scribe([book], max_waiting=2)
    scribe.note(FINISHED)
    assert await asyncio.to_thread(book.begun.wait, WAIT_S)
    for _ in range(5):
        scribe.note(FINISHED)
    book.gate.set()
    await scribe.close(WAIT_S)
    assert book.written == ["one"] * 3
    told = [record.message for record in caplog.records]
    assert len(told) == 2, "once as it begins, and the sum"
    assert "3 records" in told[1]


@asynchronous
async def test_nobody_waits_for_a_writer_that_is_stuck(caplog: pytest.LogCaptureFixture) -> None:
    book = Book()
    book.gate.clear()
    scribe = Scribe([book])
    for _ in range(4):
        scribe.note(FINISHED)
    assert await asyncio.to_thread(book.begun.wait, WAIT_S)
    await scribe.close(0.01)
    assert "what waits is lost, 3 records" in caplog.text
    book.gate.set()
