"""Keeps one rank alive: starts it, loads it, notices its end, starts it again. Knows no gRPC, Ray or requests."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from configs.schema import ServeSettings, WorkerSettings
from runtime.cluster.launcher import LaunchedWorker, Launcher
from runtime.cluster.process_launcher import ProcessLauncher
from workers.client import WorkerClient
from workers.plan import LoadError, Progress, WorkerDescription, WorkerError, WorkerLost

log = logging.getLogger(__name__)

LAUNCH_STAGE = "launch"

AFTERMATH_S = 0.5
"""How long a broken link waits to be explained by the end of its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorker:
    """A loaded rank.

    epoch: which life of the rank this is; goes into every plan.
    lost: set, with the reason, when the process or the link is no more, whether or not a step is in flight.
    """

    link: WorkerClient
    description: WorkerDescription
    epoch: int
    lost: asyncio.Future[str]


class WorkerSupervisor:
    """Owns at most one worker process. `start`, `restart` and `stop` are called one at a time."""

    def __init__(self, settings: ServeSettings, launcher: Launcher) -> None:
        self._settings = settings
        self._launcher = launcher
        self._progress: Progress = _ignore
        self._epoch = 0
        self._launched: LaunchedWorker | None = None
        self._link: WorkerClient | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def launched(self) -> LaunchedWorker | None:
        """The process of the present life, for reports; None between lives."""
        return self._launched

    async def start(self, progress: Progress) -> RunningWorker:
        """Launches and loads; `progress` is kept for later lives.

        Raises LoadError when the worker refuses what it is to load, WorkerLost when it dies or `start_timeout_s` is
        over; both name the stage. Nothing is left running then, nor when the call is cancelled.
        """
        self._progress = progress
        return await self._begin_life()

    async def restart(self, reason: str) -> RunningWorker:
        """Ends what is left of the present life, then begins the next. Raises as `start` does; may be tried again."""
        log.warning("worker of epoch %d is replaced: %s", self._epoch, reason)
        await self._end_life()
        return await self._begin_life()

    async def stop(self) -> None:
        """Ends the worker and lets the launcher go. Idempotent. Raises WorkerError when a process outlives its kill."""
        try:
            await self._end_life()
        finally:
            await self._launcher.close()

    async def _begin_life(self) -> RunningWorker:
        assert self._launched is None, "the life before has not ended"
        self._epoch += 1
        timeout_s = self._settings.cluster.start_timeout_s
        stage = LAUNCH_STAGE

        def advance(name: str, done: int, total: int) -> None:
            nonlocal stage
            stage = name
            self._progress(name, done, total)

        try:
            async with asyncio.timeout(timeout_s):
                running = await self._launch_and_load(advance)
        except TimeoutError:
            await self._end_life()
            raise WorkerLost(f"the worker's start took more than {timeout_s:g} s, at stage {stage!r}") from None
        except LoadError as error:
            await self._end_life()
            raise LoadError(f"loading failed at stage {stage!r}: {error}") from None
        except WorkerError as error:
            reason = await self._explain(error)
            await self._end_life()
            raise WorkerLost(f"the worker failed at stage {stage!r}: {reason}") from None
        except BaseException:
            await self._end_life()
            raise
        return running

    async def _launch_and_load(self, progress: Progress) -> RunningWorker:
        settings = worker_settings(self._settings)
        progress(LAUNCH_STAGE, 0, 1)
        self._launched = launched = await self._launcher.launch(settings, self._epoch)
        progress(LAUNCH_STAGE, 1, 1)
        self._link = link = WorkerClient(launched.address, step_timeout_s=self._settings.cluster.step_timeout_s)
        description = await link.load(settings, progress)
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(_watch(launched, link, lost))
        log.info("%s serves epoch %d at %s", launched.name, self._epoch, launched.address)
        return RunningWorker(link=link, description=description, epoch=self._epoch, lost=lost)

    async def _explain(self, error: WorkerError) -> str:
        """Why a start failed: the end of the process if it has ended, with what it said last."""
        if self._launched is None:
            return str(error)
        death = await _death_within(AFTERMATH_S, self._launched)
        if death is None:
            return str(error)
        tail = self._launched.log_tail()
        return f"{death}; its log ends:\n{tail}" if tail else death

    async def _end_life(self) -> None:
        """In this order: no more news, no more link, no more process."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
            self._watcher = None
        if self._link is not None:
            await self._link.close()
            self._link = None
        if self._launched is not None:
            await self._launched.kill()
            self._launched = None


def worker_settings(settings: ServeSettings) -> WorkerSettings:
    """What the one rank of a deployment is told."""
    return WorkerSettings(
        model=settings.model,
        cache=settings.cache,
        speculation=settings.speculation,
        max_step_tokens=settings.scheduler.max_step_tokens,
        threads=settings.cluster.worker_threads,
    )


def launcher_for(settings: ServeSettings) -> Launcher:
    """The launcher that `cluster.launcher` names."""
    if settings.cluster.launcher == "process":
        return ProcessLauncher(settings.cluster, settings.state_dir)
    from runtime.cluster.ray_launcher import RayLauncher

    return RayLauncher(settings.cluster, settings.state_dir)


async def _watch(launched: LaunchedWorker, link: WorkerClient, lost: asyncio.Future[str]) -> None:
    """Waits for the end of the process or of the link; each ends the other's use."""
    death = asyncio.create_task(launched.wait_dead())
    try:
        await asyncio.wait({death, link.lost}, return_when=asyncio.FIRST_COMPLETED)
        if not death.done():
            await asyncio.wait({death}, timeout=AFTERMATH_S)
        reason = death.result() if death.done() else link.lost.result()
        link.abandon(reason)
        lost.set_result(reason)
    finally:
        death.cancel()


async def _death_within(timeout_s: float, launched: LaunchedWorker) -> str | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await launched.wait_dead()
    except TimeoutError:
        return None


def _ignore(stage: str, done: int, total: int) -> None:
    pass
