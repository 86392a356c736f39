"""A thread that writes down what others noted, so that the event loop waits for no line and no span. Knows not what is
written.

What comes faster than it is written is dropped past a bound, and counted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

from runtime.observe.records import RequestRecord, StepRecord

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Records that may wait. A writer is that far behind where its output is stuck."""


class Writer(Protocol):
    """Called by one thread, and may raise: that is logged once, and serving goes on."""

    def write_request(self, record: RequestRecord, ended_ns: int) -> None:
        """ended_ns: when it ended, in nanoseconds since the epoch."""
        ...

    def write_step(self, record: StepRecord, ended_ns: int) -> None: ...

    def close(self) -> None:
        """Nothing more comes. May take long; nobody waits beyond the bound of `Scribe.close`."""
        ...


class Scribe:
    """The thread starts with the first record. All methods are called from one other thread."""

    def __init__(self, writers: Sequence[Writer], *, max_waiting: int = MAX_WAITING) -> None:
        self._writers = tuple(writers)
        self._max_waiting = max_waiting
        # None is the end.
        self._queue: SimpleQueue[tuple[int, RequestRecord | StepRecord] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._num_dropped = 0
        self._have_failed: set[Writer] = set()

    def note(self, record: RequestRecord | StepRecord) -> None:
        """Has a record that is made now written. Returns at once; does nothing after `close`."""
        if self._is_closed:
            return
        if self._queue.qsize() >= self._max_waiting:
            self._drop()
            return
        self._queue.put((time.time_ns(), record))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="scribe", daemon=True)
            self._thread.start()

    async def close(self, timeout_s: float) -> None:
        """Returns when all is written, or after `timeout_s`; what is not written then is lost. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        thread = self._thread or threading.Thread(target=self._run, name="scribe", daemon=True)
        if self._thread is None:
            thread.start()
        await asyncio.to_thread(thread.join, timeout_s)
        if thread.is_alive():
            log.warning(
                "logs or traces are not written out after %g s: what waits is lost, %d records", timeout_s, self._left
            )
        if self._num_dropped:
            log.warning("%d records of requests and steps were dropped in all", self._num_dropped)

    @property
    def _left(self) -> int:
        return max(0, self._queue.qsize() - 1)

    def _drop(self) -> None:
        self._num_dropped += 1
        if self._num_dropped == 1:
            log.warning("logs or traces are %d records behind; those that follow are dropped", self._max_waiting)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            ended_ns, record = item
            for writer in self._writers:
                self._write(writer, record, ended_ns)
            # The event loop need not wait for a turn until this thread has had its whole one.
            time.sleep(0)
        for writer in self._writers:
            try:
                writer.close()
            except Exception:
                log.exception("%s did not close", type(writer).__name__)

    def _write(self, writer: Writer, record: RequestRecord | StepRecord, ended_ns: int) -> None:
        try:
            if isinstance(record, RequestRecord):
                writer.write_request(record, ended_ns)
            else:
                writer.write_step(record, ended_ns)
        except Exception:
            if writer not in self._have_failed:
                log.exception("%s failed on a record; it is not said again", type(writer).__name__)
            self._have_failed.add(writer)
