"""What the engine needs of a group of ranks and of whoever starts it. Interfaces only; knows no Ray and no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from parallel.mesh import Mesh
from workers.demands import Constraint
from workers.plan import StepPlan, StepResult, WorkerDescription

RankProgress = Callable[[int, str, int, int], None]
"""Which rank, what it loads, how much of that is done, how much there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """name: of the process or actor. address: host:port of its link."""

    name: str
    address: str


class StepLink(Protocol):
    """The way to all ranks of a loaded group. Plans go in order, one result comes back for each."""

    async def execute(self, plan: StepPlan) -> StepResult:
        """Raises WorkerLost, StepTimeout, RanksDisagree or another WorkerError, which names the rank; the whole group
        is unusable after any of them."""
        ...

    async def check_integrity(self) -> list[list[str]]:
        """Violated invariants of every rank's pools, in rank order, looked for between two steps. Raises WorkerError
        when a rank cannot say."""
        ...

    async def prepare(self, constraint: Constraint) -> str:
        """Has the ranks that decide make a constraint ready, beside the steps. Returns why it cannot be followed, ""
        where it can. Raises WorkerError when a rank cannot say; the group is as usable as before."""
        ...


class LoadedGroup(Protocol):
    """A group of ranks as the engine sees it, from its load to its loss."""

    @property
    def link(self) -> StepLink: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def description(self) -> WorkerDescription:
        """Rank 0's, with the slots and pages that every data-parallel rank has."""
        ...

    @property
    def ranks(self) -> tuple[WorkerDescription, ...]:
        """Each rank's own, in order."""
        ...

    @property
    def places(self) -> tuple[RankPlace, ...]:
        """Where each rank is, in order."""
        ...

    @property
    def epoch(self) -> int:
        """Which life of the group this is; rises with every start."""
        ...

    @property
    def lost(self) -> asyncio.Future[str]:
        """Done, with the reason, when any rank is no more, whether or not a step is in flight."""
        ...


class GroupSource(Protocol):
    """Starts groups of ranks and brings them back, whole."""

    async def start(self, progress: RankProgress) -> LoadedGroup:
        """Launches and loads all ranks. Raises WorkerError that names the rank and its reason."""
        ...

    async def restart(self, reason: str) -> LoadedGroup:
        """Ends what is left of the group and starts anew with a fresh epoch. Raises WorkerError; may be retried."""
        ...

    async def stop(self) -> None:
        """Ends all ranks. Idempotent."""
        ...
