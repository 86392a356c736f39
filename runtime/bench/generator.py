"""Sends the requests of one cell, so many at a time or as they are due. Knows no server: how one is sent is given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from runtime.bench.completion import Clock

_T = TypeVar("_T")

Send = Callable[[int, float], Awaitable[_T]]
"""Sends request number i, which was due at a moment of the clock, and answers with what came of it."""
Sleep = Callable[[float], Awaitable[object]]


async def closed_loop(send: Send[_T], number: int, concurrency: int, clock: Clock) -> list[_T]:
    """`number` requests by `concurrency` clients; each sends the next when its last one has ended, so one is due when a
    client is free. Results in the order of numbers."""
    results: dict[int, _T] = {}
    numbers = iter(range(number))

    async def client() -> None:
        for i in numbers:
            results[i] = await send(i, clock())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, number)):
            tasks.create_task(client())
    return [results[i] for i in range(number)]


async def open_loop(send: Send[_T], arrivals: Sequence[float], clock: Clock, sleep: Sleep = asyncio.sleep) -> list[_T]:
    """A request at each of `arrivals`, seconds from now, however many are under way. Where the generator is late it
    sends at once; the due time stays. Results in the order of arrivals."""
    began_s = clock()

    async def sent(i: int, due_s: float) -> _T:
        return await send(i, due_s)

    async with asyncio.TaskGroup() as tasks:
        sending = []
        for i, arrival_s in enumerate(arrivals):
            due_s = began_s + arrival_s
            if (early_s := due_s - clock()) > 0:
                await sleep(early_s)
            sending.append(tasks.create_task(sent(i, due_s)))
    return [task.result() for task in sending]
