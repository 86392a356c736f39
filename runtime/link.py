"""What the engine needs of a worker and of whoever starts it. Interfaces only; knows no Ray and no gRPC."""

from __future__ import annotations

import asyncio
from typing import Protocol

from workers.plan import Progress, StepPlan, StepResult, WorkerDescription


class StepLink(Protocol):
    """The way to one loaded worker. Plans go in order, one result comes back for each."""

    async def execute(self, plan: StepPlan) -> StepResult:
        """Raises WorkerLost, StepTimeout or another WorkerError; the worker is unusable after any of them."""
        ...


class LoadedWorker(Protocol):
    """A worker as the engine sees it, from its load to its loss."""

    @property
    def link(self) -> StepLink: ...

    @property
    def description(self) -> WorkerDescription: ...

    @property
    def epoch(self) -> int:
        """Which life of the worker this is; rises with every start."""
        ...

    @property
    def lost(self) -> asyncio.Future[str]:
        """Done, with the reason, when the worker is no more, whether or not a step is in flight."""
        ...


class WorkerSource(Protocol):
    """Starts workers and brings them back."""

    async def start(self, progress: Progress) -> LoadedWorker:
        """Launches and loads. Raises WorkerError."""
        ...

    async def restart(self, reason: str) -> LoadedWorker:
        """Ends what is left of the worker and starts anew with a fresh epoch. Raises WorkerError; may be retried."""
        ...

    async def stop(self) -> None:
        """Ends the worker. Idempotent."""
        ...
