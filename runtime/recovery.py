"""From the loss of the ranks to a life that goes on: what waits is kept, within bounds, and told where it cannot be.
Knows no events and no policy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from configs.schema import ServeSettings
from runtime.books import Books
from runtime.life import Life, Trial, next_life
from runtime.link import GroupSource
from runtime.readiness import Readiness
from runtime.waiting import give_up_waiting, keep_time_limits, prepare_waiting


async def bring_back(
    books: Books,
    readiness: Readiness,
    groups: GroupSource,
    settings: ServeSettings,
    adopt: Callable[[Life], None],
    *,
    cause: str,
    trial: Trial,
    pause: Callable[[float], Awaitable[None]],
    clock: Callable[[], float],
) -> Life:
    """Starts the ranks anew, however many attempts that takes. `readiness` knows of their loss, and is told of attempts
    that fail.

    Waiting requests wait on, but from the loss no longer than one start may take, nor beyond their own time limits.
    What they are constrained to is ready on the new ranks when this returns, unless these are lost again: lives that
    end before they serve are of one outage.

    adopt: takes the life that comes of it. cause: why the last one ended. trial, pause, clock: see `next_life`.
    """
    patience_s = max(0.0, settings.cluster.start_timeout_s - readiness.present_outage_s)
    patience = asyncio.get_running_loop().call_later(patience_s, lambda: give_up_waiting(books, readiness.outage))
    if not patience_s:
        give_up_waiting(books, readiness.outage)
    limits = asyncio.create_task(keep_time_limits(books), name="time limits")
    try:
        life = await next_life(
            books.life,
            groups,
            books.queue,
            settings,
            cause=cause,
            trial=trial,
            pause=pause,
            clock=clock,
            on_failure=lambda error: readiness.lose(f"{cause}; a restart failed: {error}"),
        )
        adopt(life)
        await prepare_waiting(books, life.group)
    finally:
        patience.cancel()
        limits.cancel()
    return life
