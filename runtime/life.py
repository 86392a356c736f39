"""One life of the group, from a start to its loss, and how the next one begins. Knows no events and no front."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from configs.schema import ServeSettings
from runtime.link import GroupSource, LoadedGroup, RankProgress
from runtime.scheduler.group import GroupScheduler
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.routing import PrefixRouter
from runtime.scheduler.scheduler import Scheduler
from state.ledger import Ledger

log = logging.getLogger(__name__)

RESTART_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses before restarts, one for each setback in a row; the last one repeats."""

YOUNG_LIFE_S = 60.0
"""A life that ends before this and has completed no step has failed as a start fails: the next may well do the same."""


@dataclass(slots=True)
class Life:
    """A loaded group and the scheduler of what runs on it.

    began_s: when it began, on the engine's clock.
    num_young_before: lives that ended young in a row right before it.
    num_steps: steps with sequences that it has completed.
    """

    group: LoadedGroup
    scheduler: GroupScheduler
    began_s: float
    num_young_before: int = 0
    num_steps: int = 0

    def num_young(self, now_s: float) -> int:
        """Lives that ended young in a row, this one included if it ends now."""
        is_young = self.num_steps == 0 and now_s - self.began_s < YOUNG_LIFE_S
        return self.num_young_before + 1 if is_young else 0


Trial = Callable[[LoadedGroup, ServeSettings, Life | None, RankProgress], Awaitable[Life | None]]
"""What ranks must do before anybody is let in. Takes the life before, of these ranks or of others, or None; returns the
one to go on from, since ids of steps and epochs of slots must rise as long as ranks live. Raises where ranks fail."""


async def untried(
    group: LoadedGroup, settings: ServeSettings, last: Life | None, progress: RankProgress
) -> Life | None:
    """A Trial that asks for nothing."""
    return last


def begin_life(
    group: LoadedGroup, queue: WaitingQueue, settings: ServeSettings, last: Life | None, *, now_s: float
) -> Life:
    """Fresh pools and the old queue; prefixes of the last life are forgotten with it. Step ids and slot epochs go on
    rising, so nothing of an earlier life is taken for something of this one. Raises ValueError when the step size does
    not suit the ranks."""
    description = group.description
    next_epochs = [scheduler.ledger.slots.next_epoch for scheduler in last.scheduler.schedulers] if last else [1]
    schedulers = [
        Scheduler(
            Ledger(
                cache_groups=description.cache_groups,
                num_pages=description.num_pages,
                page_size=description.page_size,
                num_slots=description.num_slots,
                first_epoch=max(next_epochs),
            ),
            max_step_tokens=settings.scheduler.max_step_tokens,
            gamma_max=description.gamma_max,
        )
        for _ in range(group.mesh.dp)
    ]
    # What a rank's pages could hold of prompts is what is worth remembering of them.
    router = PrefixRouter(
        group.mesh.dp, block_size=description.page_size, capacity=max(description.num_pages, default=1)
    )
    scheduler = GroupScheduler(
        queue,
        schedulers,
        router,
        epoch=group.epoch,
        first_step_id=last.scheduler.next_step_id if last else 1,
    )
    return Life(group, scheduler, now_s)


async def next_life(
    last: Life,
    groups: GroupSource,
    queue: WaitingQueue,
    settings: ServeSettings,
    *,
    cause: str,
    trial: Trial,
    pause: Callable[[float], Awaitable[None]],
    clock: Callable[[], float],
    on_failure: Callable[[Exception], None],
) -> Life:
    """Brings the group back after `last`, however many attempts that takes.

    cause: why that life ended. trial: of ranks that are back. on_failure: hears why an attempt failed, before the next
    one.

    The first attempt is made at once, but for lives that die young one after the other: a fault that every start brings
    along would otherwise keep the machine starting ranks for ever.
    """
    num_young = last.num_young(clock())
    num_setbacks = max(0, num_young - 1)
    if num_setbacks:
        log.error("%d lives in a row ended before they had completed a step", num_young)
    while True:
        if num_setbacks:
            pause_s = RESTART_PAUSES_S[min(num_setbacks, len(RESTART_PAUSES_S)) - 1]
            log.warning("the next attempt to restart the group follows in %g s", pause_s)
            await pause(pause_s)
        try:
            group = await groups.restart(cause)
            tried = await trial(group, settings, last, lambda *done: None)
            life = begin_life(group, queue, settings, tried, now_s=clock())
        # Whatever stops a start, giving up would leave a server that never serves again.
        except Exception as error:
            num_setbacks += 1
            log.exception("an attempt to restart the group failed")
            on_failure(error)
            continue
        life.num_young_before = num_young
        return life
