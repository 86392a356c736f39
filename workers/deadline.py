"""A deadline that counts the event loop's running time. Knows nothing of what is waited for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TICK_S = 0.1
"""Longest tick: a loop that stood still for longer was not running."""


@contextmanager
def running_alarm(limit_s: float, ring: Callable[[], None]) -> Iterator[None]:
    """Calls `ring` once, from the running loop, when the body takes longer than `limit_s`; the body goes on.

    Made for a peer that must not be blamed for our own standstills. The limit is counted in ticks of the loop, and a
    tick that took twice its time does not count: the loop was blocked or the process stopped, and what came in
    meanwhile is unread. So a result that is there when the loop runs again has at least one whole tick to be read in.
    """
    loop = asyncio.get_running_loop()
    num_left = math.ceil(limit_s / TICK_S)
    tick_s = limit_s / num_left
    timer: asyncio.TimerHandle

    def tick(begin_s: float) -> None:
        nonlocal num_left, timer
        now_s = loop.time()
        num_left -= now_s - begin_s < 2 * tick_s
        if num_left:
            timer = loop.call_later(tick_s, tick, now_s)
        else:
            ring()

    timer = loop.call_later(tick_s, tick, loop.time())
    try:
        yield
    finally:
        timer.cancel()
