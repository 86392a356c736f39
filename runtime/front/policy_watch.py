"""Who is told of changes of the policy, and how many may be. Knows no message and no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.front.engine_link import PolicyLink
from runtime.front.errors import Overloaded, Unavailable

MAX_WATCHERS = 64


class PolicyWatch:
    """One watcher. A change wakes it once, however many follow before it looks: a slow reader holds no queue, and reads
    the newest state when it comes to it."""

    def __init__(self) -> None:
        self._is_stopping = False
        self._woken = asyncio.Event()

    async def next_change(self) -> None:
        """Returns when the policy has changed since this returned last. Raises Unavailable when the server stops."""
        await self._woken.wait()
        if self._is_stopping:
            raise _stopping()
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        self._is_stopping = True
        self._woken.set()


class PolicyWatches:
    """Those of one server."""

    def __init__(self, policies: PolicyLink) -> None:
        self._policies = policies
        self._open: set[PolicyWatch] = set()
        self._is_stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def open(self) -> Iterator[PolicyWatch]:
        """A watcher of the changes from now on.

        Raises Overloaded where too many watch already, Unavailable where the server stops.
        """
        if self._is_stopping:
            raise _stopping()
        if len(self._open) >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} clients watch the policy already; read it instead, or end a watch")
        watch = PolicyWatch()
        leave = self._policies.add_listener(lambda state: watch.wake())
        self._open.add(watch)
        self._idle.clear()
        try:
            yield watch
        finally:
            leave()
            self._open.discard(watch)
            if not self._open:
                self._idle.set()

    async def stop(self, timeout_s: float) -> None:
        """Ends all watches and opens none any more. Returns when they have ended, after `timeout_s` at the latest: a
        watcher that reads nothing is not waited for any longer."""
        self._is_stopping = True
        for watch in self._open:
            watch.stop()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return


def _stopping() -> Unavailable:
    return Unavailable("this server is stopping; ask another one")
