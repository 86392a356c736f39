"""One life of the worker, from a start to its loss, and how the next one begins. Knows no events and no front."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from configs.schema import ServeSettings
from runtime.link import LoadedWorker, WorkerSource
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.scheduler import Scheduler
from state.ledger import Ledger

log = logging.getLogger(__name__)

RESTART_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses after failed restarts; the last one repeats."""


@dataclass(frozen=True, slots=True)
class Life:
    """A loaded worker and the scheduler of what runs on it."""

    worker: LoadedWorker
    scheduler: Scheduler


def begin_life(worker: LoadedWorker, queue: WaitingQueue, settings: ServeSettings, last: Life | None) -> Life:
    """Fresh pools and the old queue. Step ids and slot epochs go on rising, so nothing of an earlier life is taken for
    something of this one. Raises ValueError when the step size does not suit the worker."""
    description = worker.description
    ledger = Ledger(
        cache_groups=description.cache_groups,
        num_pages=description.num_pages,
        page_size=description.page_size,
        num_slots=description.num_slots,
        first_epoch=last.scheduler.ledger.slots.next_epoch if last else 1,
    )
    scheduler = Scheduler(
        queue,
        ledger,
        worker_epoch=worker.epoch,
        max_step_tokens=settings.scheduler.max_step_tokens,
        gamma_max=description.gamma_max,
        first_step_id=last.scheduler.next_step_id if last else 1,
    )
    return Life(worker, scheduler)


async def next_life(
    last: Life,
    workers: WorkerSource,
    queue: WaitingQueue,
    settings: ServeSettings,
    *,
    cause: str,
    pause: Callable[[float], Awaitable[None]],
) -> Life:
    """Brings the worker back after `last`, however many attempts that takes. `cause`: why that life ended."""
    attempt = 0
    while True:
        try:
            return begin_life(await workers.restart(cause), queue, settings, last)
        # Whatever stops a start, giving up would leave a server that never serves again.
        except Exception:
            pause_s = RESTART_PAUSES_S[min(attempt, len(RESTART_PAUSES_S) - 1)]
            attempt += 1
            log.exception("attempt %d to restart the worker failed; the next one follows in %g s", attempt, pause_s)
        await pause(pause_s)
