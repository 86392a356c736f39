"""Notices a step that takes too long, while it does. Knows no step but when it began.

One task looks, at the moment when the step in flight would be late; a step costs it two assignments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PERIOD_S = 1.0
"""Longest time between two looks: the limit may be lowered meanwhile."""


class StallWatch:
    """limit_s: tells how long a step may take. tell: hears True when one has taken longer, False when it is over.
    clock: seconds."""

    def __init__(self, limit_s: Callable[[], float], tell: Callable[[bool], None], clock: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._tell = tell
        self._clock = clock
        self._began_s: float | None = None
        self._is_late = False

    def begin(self) -> None:
        """A step begins."""
        self._began_s = self._clock()

    def end(self) -> None:
        """It is over. Does nothing where none has begun."""
        self._began_s = None
        if self._is_late:
            self._is_late = False
            self._tell(False)

    def look(self) -> float:
        """Tells of a step that is late. Returns in how many seconds the next look is due: none is then seen late."""
        limit_s = self._limit_s()
        if self._began_s is None or self._is_late:
            return min(limit_s, PERIOD_S)
        left_s = self._began_s + limit_s - self._clock()
        if left_s > 0:
            return min(left_s, PERIOD_S)
        self._is_late = True
        self._tell(True)
        return min(limit_s, PERIOD_S)

    async def run(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Looks until it is cancelled."""
        while True:
            await sleep(self.look())
