"""The streams of one call's sequences, read in turn by one writer. Knows no gRPC and no engine.

    streaming    whatever is unread, of one sequence after another
    whole        all of sequence 0, then of 1, ..., once every one has ended: nothing goes out of a call that fails

A sequence that fails ends the call, after what is unread of those that have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from runtime.front.hub import Abandon, OutputStream, StreamHub
from runtime.request import Usage, total_of
from runtime.stream.text_stream import Delta, TextStream


class SequenceStreams:
    """Of one request with its sequences in order of index. Read by one writer, on the hub's event loop."""

    def __init__(
        self,
        streams: Sequence[OutputStream],
        bell: asyncio.Event,
        *,
        whole: bool,
        on_tokens: Callable[[int], None] = lambda _: None,
    ) -> None:
        """bell: the one that all of them ring. on_tokens: hears how many tokens of output each delta brings, and at the
        end how many came besides."""
        self._streams = streams
        self._bell = bell
        self._whole = whole
        self._on_tokens = on_tokens
        # In the order in which they are looked at: who has been read goes to the end.
        self._turns = list(range(len(streams)))
        self._usages = [Usage(prompt=0) for _ in streams]

    @property
    def is_done(self) -> bool:
        """Every sequence's last delta was taken."""
        return not self._turns

    @property
    def total(self) -> Usage | None:
        """Of all sequences, as far as they were taken; None where there is but one."""
        return total_of(self._usages) if len(self._streams) > 1 else None

    def unfinished(self) -> list[int]:
        """Places of those that have neither ended nor failed."""
        return [place for place, stream in enumerate(self._streams) if not stream.is_over]

    async def take(self) -> tuple[int, Delta]:
        """The place of a sequence and all that is unread of it; waits until there is something.

        Raises the error of a sequence that has failed.
        """
        while (place := self._next()) is None:
            self._bell.clear()
            await self._bell.wait()
        delta = await self._streams[place].take()
        self._on_tokens(delta.usage.completion - self._usages[place].completion)
        self._usages[place] = delta.usage
        self._turns.remove(place)
        if delta.finish is None:
            self._turns.append(place)
        return place, delta

    def settle(self) -> None:
        """Tells `on_tokens` of what has come and will never be taken: the reader leaves."""
        for place, stream in enumerate(self._streams):
            self._on_tokens(stream.num_completed - self._usages[place].completion)

    def _next(self) -> int | None:
        """Whose turn it is; None while nobody has anything."""
        failed = [place for place in self._turns if self._streams[place].has_failed]
        if self._whole:
            return min(failed or self._turns) if failed or not self.unfinished() else None
        # Beside an error only what has ended is still read: those that go on might have something for ever.
        ready = (
            place
            for place in self._turns
            if self._streams[place].is_ready and place not in failed and (not failed or self._streams[place].is_over)
        )
        return next(ready, failed[0] if failed else None)


@contextmanager
def open_sequences(
    hub: StreamHub,
    first_uid: int,
    texts: Sequence[TextStream],
    *,
    abort: Abandon,
    whole: bool,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Iterator[SequenceStreams]:
    """The streams of a request, taken up before it is submitted and dropped on leaving.

    texts: one per sequence; their uids go from `first_uid` on. abort: see StreamHub.stream. on_tokens: as in
    SequenceStreams.
    """
    bell = asyncio.Event()
    with ExitStack() as stack:
        streams = [
            stack.enter_context(hub.stream(first_uid + index, text, abort=abort, whole=whole, bell=bell))
            for index, text in enumerate(texts)
        ]
        sequences = SequenceStreams(streams, bell, whole=whole, on_tokens=on_tokens)
        try:
            yield sequences
        finally:
            sequences.settle()
