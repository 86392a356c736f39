"""Why a group of ranks ended: the first bad news opens an inquest, the best explanation closes it. Knows no gRPC.

Ranks of a group wait for each other in collectives, so that the end of one is heard from all, in any order:

    1  a process died, or ranks disagree        certain: closes the inquest at once
    2  a rank raised an error of its own
    3  a step passed its deadline               names the ranks that have said nothing
    4  a collective failed                      mostly the echo of another rank's end
    5  a link broke                             says nothing of why

Within a class the first one heard counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from parallel.mesh import Mesh
from runtime.cluster.launcher import RankDied
from workers.client import LinkBroken
from workers.plan import CollectiveFailed, RanksDisagree, StepTimeout, WorkerError, WorkerLost

T = TypeVar("T")

AFTERMATH_S = 0.5
"""How long an inquest stays open for a better explanation."""

CERTAIN = 1


def rank_name(mesh: Mesh, rank: int) -> str:
    """A rank and its place, for errors and logs."""
    return f"rank {rank}" if mesh.size == 1 else f"rank {rank} (dp {mesh.dp_rank(rank)}, tp {mesh.tp_rank(rank)})"


def rank_names(mesh: Mesh, ranks: Sequence[int]) -> str:
    return ", ".join(rank_name(mesh, rank) for rank in ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The ranks at fault, none where that is not known, and what was heard of them."""

    ranks: tuple[int, ...]
    error: WorkerError

    def describe(self, mesh: Mesh) -> str:
        return f"{rank_names(mesh, self.ranks)}: {self.error}" if self.ranks else str(self.error)


class Inquest:
    """Of one life of a group. Belongs to the event loop it was made in.

    verdict: set AFTERMATH_S after the first bad news, or at the first that is certain.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._mesh = mesh
        self._heard: list[tuple[int | None, WorkerError]] = []

    def hear(self, rank: int | None, error: BaseException) -> None:
        """Bad news of a rank, or of the group. What comes after the verdict is ignored."""
        if self.verdict.done():
            return
        if not isinstance(error, WorkerError):
            error = WorkerLost(f"{type(error).__name__}: {error}")
        if not self._heard:
            asyncio.get_running_loop().call_later(AFTERMATH_S, self._close)
        self._heard.append((rank, error))
        if _class_of(error) == CERTAIN:
            self._close()

    async def together(self, tasks: Sequence[asyncio.Task[T]]) -> list[T]:
        """What all ranks came to, in rank order. Where one fails, or its process dies meanwhile, the tasks of the
        others are cancelled at the verdict, which is raised as an error of the kind that was heard."""
        for rank, task in enumerate(tasks):
            task.add_done_callback(partial(self._listen, rank))
        either: set[asyncio.Future[Any]] = {asyncio.gather(*tasks, return_exceptions=True), self.verdict}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if all(task.done() and not task.cancelled() and task.exception() is None for task in tasks):
                return [task.result() for task in tasks]
            await self.fail()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def fail(self) -> NoReturn:
        """Waits for the verdict and raises it."""
        verdict = await asyncio.shield(self.verdict)
        raise type(verdict.error)(verdict.describe(self._mesh))

    def _listen(self, rank: int, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.hear(rank, error)

    def _close(self) -> None:
        if self.verdict.done():
            return
        rank_at_fault, error = min(self._heard, key=lambda heard: _class_of(heard[1]))
        ranks = [] if rank_at_fault is None else [rank_at_fault]
        if isinstance(error, StepTimeout):
            late = [rank for rank, heard in self._heard if isinstance(heard, StepTimeout) and rank is not None]
            echoes = {rank for rank, heard in self._heard if isinstance(heard, CollectiveFailed)}
            ranks = [rank for rank in late if rank not in echoes] or late
        self.verdict.set_result(Verdict(ranks=tuple(ranks), error=error))


def _class_of(error: WorkerError) -> int:
    if isinstance(error, RankDied | RanksDisagree):
        return CERTAIN
    if isinstance(error, StepTimeout):
        return 3
    if isinstance(error, CollectiveFailed):
        return 4
    return 5 if isinstance(error, LinkBroken) else 2
