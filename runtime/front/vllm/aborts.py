"""Aborts by request id, which may come before their request, beside its end, or twice. Knows no engine and no frames.

    unknown ──abort──▶ awaited ──begin──▶ aborted at once            forgotten after `EARLY_S`
    live ──abort──▶ aborted                                          every call of that id
    ended ──abort──▶ nothing                                         remembered for as long

What has ended must not be taken for what has not yet come: a gateway that retries under one id would abort itself.
Ids are of their callers: what one caller aborts is nobody else's. They match as a whole, never by a prefix.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from runtime.front.errors import AbortedByCaller

EARLY_S = 30.0
"""How long an abort waits for its request, and an end for its abort."""
MAX_REMEMBERED = 4096
"""Aborts that wait, and ends; the oldest go first."""

Key = tuple[str, str]
"""The caller's name and its name for the request."""


class Abortable:
    """One call that may be aborted while it waits for something."""

    def __init__(self, *, is_aborted: bool) -> None:
        self._is_aborted = is_aborted
        self._end_work: Callable[[], None] = lambda: None
        self._scope: asyncio.Timeout | None = None

    def abort(self) -> None:
        """Ends the wait that goes on and the work, and refuses others. Idempotent."""
        self._is_aborted = True
        self._end_work()
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    def follow(self, end_work: Callable[[], None]) -> None:
        """Has an abort end the work at once, also where the call waits for a client that does not read."""
        self._end_work = end_work

    def check(self) -> None:
        """Raises AbortedByCaller where the call has been aborted."""
        if self._is_aborted:
            raise AbortedByCaller("the caller has aborted the request")

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Around a wait. Raises AbortedByCaller where the call has been aborted, before or meanwhile."""
        self.check()
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            if not self._is_aborted:
                raise
            raise AbortedByCaller("the caller has aborted the request") from None
        finally:
            self._scope = None


class Aborts:
    """All calls of a face that are live, aborts that came early, and calls that have lately ended.

    clock: seconds; tests pass their own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._live: dict[Key, list[Abortable]] = {}
        self._early = Recent(clock)
        self._ended = Recent(clock)

    @contextmanager
    def call(self, caller: str, request_id: str) -> Iterator[Abortable]:
        """A call from its arrival to its end."""
        key = caller, request_id
        call = Abortable(is_aborted=self._early.take(key))
        self._live.setdefault(key, []).append(call)
        try:
            yield call
        finally:
            self._live[key].remove(call)
            if not self._live[key]:
                del self._live[key]
            self._ended.note(key)

    def abort(self, caller: str, request_ids: Sequence[str]) -> None:
        """Ends the calls of these ids, those among them that are still to come. Idempotent."""
        for request_id in request_ids:
            key = caller, request_id
            if key in self._live:
                for call in self._live[key]:
                    call.abort()
            elif key not in self._ended:
                self._early.note(key)


class Recent:
    """Keys of the last `EARLY_S` seconds, the newest `MAX_REMEMBERED` of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s: OrderedDict[Key, float] = OrderedDict()

    def note(self, key: Key) -> None:
        now_s = self._clock()
        self._until_s[key] = now_s + EARLY_S
        self._until_s.move_to_end(key)
        while len(self._until_s) > MAX_REMEMBERED or next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)

    def __len__(self) -> int:
        return len(self._until_s)

    def take(self, key: Key) -> bool:
        """Whether it is there; it no longer is then."""
        is_there = key in self
        self._until_s.pop(key, None)
        return is_there

    def __contains__(self, key: Key) -> bool:
        return self._until_s.get(key, 0.0) > self._clock()
