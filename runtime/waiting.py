"""What becomes of requests in the queue while the ranks are away, and before the next ones step. Knows no schedule and
no start of ranks."""

from __future__ import annotations

import asyncio

from runtime.books import Books, cannot_follow
from runtime.front.errors import Unavailable
from runtime.link import LoadedGroup
from workers.plan import WorkerError


async def keep_time_limits(books: Books) -> None:
    """Ends what waits as its time comes to be up, while no round does. Nothing is taken in meanwhile."""
    while (wait_s := books.live.next_deadline_in_s()) is not None:
        await asyncio.sleep(max(0.0, wait_s))
        books.end_overdue()
        books.deliver(books.outbox.take())


def give_up_waiting(books: Books, outage: str) -> None:
    """Ends what waits. outage: why the ranks are not there."""
    waiting = [request.uid for request in books.queue]
    books.fail(waiting, Unavailable(f"a worker was lost and is not back ({outage}); try again"))
    books.deliver(books.outbox.take())


async def prepare_waiting(books: Books, group: LoadedGroup) -> None:
    """New ranks have compiled nothing: has them make ready what waiting requests are constrained to, before one of
    these enters a step. Whose constraint cannot be made ready now fails by itself."""
    for constraint in books.waiting_constraints():
        try:
            problem = await group.link.prepare(constraint)
        except WorkerError as error:
            if group.lost.done():  # the next life prepares them
                return
            books.fail_constrained(constraint, Unavailable(f"the constraint could not be compiled ({error})"))
            continue
        if problem:
            books.fail_constrained(constraint, cannot_follow(constraint, problem))
