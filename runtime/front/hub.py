"""The front's end of the engine's queue: events in, one bounded buffer per sequence out. Knows no gRPC, no requests.

    deliver(events) ─▶ TextStream ─▶ buffer of uid ─▶ take() by whoever writes that stream
         │                │
         └── verdicts ◀───┘ stop strings are found before the engine goes on

A buffer merges all that comes until it is taken, so a busy writer makes few and large frames. A client that reads too
slowly fills its own buffer only: past the limit its stream fails and its request is aborted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass

from runtime.events import ErrorEvent, TokenEvent, Verdict
from runtime.front.errors import InternalError, OutriderError, SlowReader
from runtime.in_force import SettingsInForce
from runtime.request import Finish, FinishReason, Round, Usage
from runtime.stream.text_stream import Delta, TextStream
from workers.demands import TokenLogprob

log = logging.getLogger(__name__)

BUSY_STREAMS = 8
"""With more open streams than this, frames of one stream keep their distance: each costs some 25 µs, whatever it
holds, and a few milliseconds of delay are then less than a client can tell."""


class OutputStream:
    """The buffer of one sequence. Written by the hub, read by one writer, both on one event loop.

    bell: rung when there is something to take. Streams with the same reader may share one.
    """

    def __init__(
        self, text: TextStream, *, pace: Pace, max_unread: Callable[[], int], whole: bool, bell: asyncio.Event
    ) -> None:
        """max_unread: tells how many tokens may wait. whole: hand out nothing before the end, and then all of it."""
        self._text = text
        self._pace = pace
        self._max_unread = max_unread
        self._whole = whole
        self._bell = bell
        self._is_ready = False
        self._taken_at_s = -math.inf
        # Tokens of the output. Those of an echoed prompt come at once, however fast the reader is.
        self._num_unread = 0
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._rounds: list[Round] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._offsets: list[int] = []
        self._usage = Usage(prompt=0)
        self._finish: Finish | None = None
        self._error: OutriderError | None = None

    @property
    def is_over(self) -> bool:
        """The end or an error has come; nothing more is taken in, though some may be unread."""
        return self._finish is not None or self._error is not None

    @property
    def is_ready(self) -> bool:
        """`take` does not wait for anything to come."""
        return self._is_ready

    @property
    def num_completed(self) -> int:
        """Tokens of output that have come, taken or not."""
        return self._usage.completion

    @property
    def has_failed(self) -> bool:
        """An error has come, and `take` raises it: nothing is unread."""
        return self._error is not None and not self._token_ids

    def add(self, event: TokenEvent) -> Verdict:
        """What the engine is to make of the event. Raises SlowReader when more is unread than may be."""
        delta = self._text.take(event)
        num_cut = delta.usage.trimmed - event.usage.trimmed
        num_before = self._num_unread
        self._num_unread += len(event.tokens) - num_cut
        self._pieces.append(delta.text)
        self._token_ids += delta.token_ids
        self._rounds += delta.rounds
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs
        self._offsets += delta.offsets
        self._usage = delta.usage
        self._finish = delta.finish
        # Log-probabilities of the prompt may come before the first token; they wait for it.
        if self.is_over or (self._token_ids and not self._whole):
            self._ring()
        # One event, and the last one, may be of any size: neither shows that the reader is slow.
        max_unread = self._max_unread()
        if num_before and not self.is_over and not self._whole and self._num_unread > max_unread:
            raise SlowReader(
                f"{self._num_unread} tokens are unread and {max_unread} may be; "
                "read faster, or ask for the whole with stream=false"
            )
        stop = delta.finish is not None and delta.finish.reason is FinishReason.STOP_STRING
        return Verdict(uid=event.uid, stop=stop, num_cut=num_cut)

    def fail(self, error: OutriderError) -> None:
        """Ends the stream with an error after what is unread. Does nothing to a stream that is over."""
        if self.is_over:
            return
        self._error = error
        if self._whole or isinstance(error, SlowReader):
            self._forget()
        self._ring()

    async def take(self) -> Delta:
        """All that is unread, as one delta; waits until there is something. The last one carries `finish`.

        Raises the error that ended the stream.
        """
        while not self._is_ready:
            self._bell.clear()
            await self._bell.wait()
        if not self.is_over:
            await self._pace.keep_distance(self._taken_at_s)
        if self._error is not None and not self._token_ids:
            raise self._error
        self._taken_at_s = self._pace.clock()
        delta = Delta(
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            usage=self._usage,
            rounds=tuple(self._rounds),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            offsets=tuple(self._offsets),
            finish=self._finish,
        )
        self._forget()
        self._is_ready = self._error is not None
        return delta

    def _ring(self) -> None:
        self._is_ready = True
        self._bell.set()

    def _forget(self) -> None:
        """Nothing is unread."""
        self._num_unread = 0
        for unread in (
            self._pieces,
            self._token_ids,
            self._rounds,
            self._logprobs,
            self._prompt_logprobs,
            self._offsets,
        ):
            unread.clear()


class Pace:
    """How far apart the frames of one stream are: at once while few streams are open, what `distance_s` tells while
    many are."""

    def __init__(
        self,
        distance_s: Callable[[], float],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.clock = clock
        self.num_streams = 0
        self._distance_s = distance_s
        self._sleep = sleep

    async def keep_distance(self, last_s: float) -> None:
        """Returns when the next frame after one at `last_s` may go."""
        wait_s = last_s + self._distance_s() - self.clock()
        if self.num_streams > BUSY_STREAMS and wait_s > 0:
            await self._sleep(wait_s)


Abandon = Callable[[int, OutriderError], None]
"""Lets go of a sequence, by uid, whose stream has failed."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A stream that is open. context: of the call that it is of."""

    stream: OutputStream
    abort: Abandon
    context: Context


class StreamHub:
    """The EventSink of the front: finds each event's stream by uid, and answers verdicts at once."""

    def __init__(self, settings: SettingsInForce, pace: Pace | None = None) -> None:
        self._settings = settings
        self._pace = pace or Pace(lambda: settings.now.server.coalesce_ms / 1000)
        self._streams: dict[int, _Entry] = {}

    @property
    def num_streams(self) -> int:
        """Sequences whose streams are open."""
        return len(self._streams)

    @contextmanager
    def stream(
        self,
        uid: int,
        text: TextStream,
        *,
        abort: Abandon,
        whole: bool = False,
        bell: asyncio.Event | None = None,
    ) -> Iterator[OutputStream]:
        """The stream of a sequence, taken up before its request is submitted and dropped on leaving.

        abort: called with the uid and the error when the stream fails here and the engine is to let go of the sequence.
        whole, bell: see OutputStream; without a bell it has one of its own.
        """
        stream = OutputStream(
            text, pace=self._pace, max_unread=self._most_unread, whole=whole, bell=bell or asyncio.Event()
        )
        # What the log is told of the stream later bears the names that the log knows of the call now.
        self._streams[uid] = _Entry(stream, abort, copy_context())
        self._pace.num_streams = len(self._streams)
        try:
            yield stream
        finally:
            del self._streams[uid]
            self._pace.num_streams = len(self._streams)

    def deliver(self, events: list[TokenEvent | ErrorEvent]) -> list[Verdict]:
        """Takes one step's events; answers those that need a verdict. Never blocks and never raises."""
        verdicts: list[Verdict] = []
        for event in events:
            # A stream that is gone (its client left) or over wants no more: its sequence may stop.
            entry = self._streams.get(event.uid)
            if isinstance(event, ErrorEvent):
                if entry is not None:
                    entry.stream.fail(entry.context.run(_visible, event))
                continue
            verdict = None
            if entry is not None and not entry.stream.is_over:
                verdict = entry.context.run(self._add, entry, event)
            if event.needs_verdict:
                verdicts.append(verdict or Verdict(uid=event.uid, stop=False, gone=True))
        return verdicts

    def fail_all(self, error: OutriderError) -> None:
        """Ends every open stream with an error and aborts its request."""
        for uid, entry in list(self._streams.items()):
            if not entry.stream.is_over:
                entry.stream.fail(error)
                entry.abort(uid, error)

    def _most_unread(self) -> int:
        return self._settings.now.server.max_frame_tokens_unread

    def _add(self, entry: _Entry, event: TokenEvent) -> Verdict:
        """That the stream is gone where it fails on the event."""
        failure: OutriderError
        try:
            return entry.stream.add(event)
        except SlowReader as error:
            failure = error
        except Exception:  # one bad stream must not take the others' step down with it
            log.exception("stream of uid %d failed", event.uid)
            failure = InternalError("the output could not be turned into text; the server's log says why")
        entry.stream.fail(failure)
        # Not from inside the engine's own call.
        asyncio.get_running_loop().call_soon(entry.abort, event.uid, failure)
        return Verdict(uid=event.uid, stop=False, gone=True, error=failure)


def _visible(event: ErrorEvent) -> OutriderError:
    """The event's error if it is one that callers may see, else a plain word, and the error in the log."""
    if isinstance(event.error, OutriderError):
        return event.error
    log.error("uid %d failed", event.uid, exc_info=event.error)
    return InternalError("the request failed; the server's log says why")
