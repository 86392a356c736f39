"""Keeps a group of ranks alive: starts and loads them, notices the end of any, starts all again. Knows no gRPC, no Ray
and no requests.

A group lives and dies as a whole. The end of one rank, of its link, or a step that failed ends the life of all: every
link is given up, every process killed, and the next life has a fresh epoch, a fresh secret, certificates read anew,
fresh processes and a fresh store. Between steps a process that dies is noticed under 1 s, a rank that stands still
after 15 s (the keepalive of its link); for faults in a step see `runtime.cluster.group`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from configs.schema import GroupSeat, ServeSettings, WorkerSettings
from parallel.mesh import Mesh
from runtime.cluster.agreement import merge_descriptions
from runtime.cluster.group import GroupLink
from runtime.cluster.inquest import Inquest, Verdict, rank_name
from runtime.cluster.launcher import LaunchedWorker, Launcher, RankDied
from runtime.cluster.process_launcher import ProcessLauncher
from runtime.link import RankPlace, RankProgress
from workers.certificates import CertificateProblem
from workers.channel import PLAIN, Security
from workers.client import LinkBroken, WorkerClient
from workers.plan import LoadError, WorkerDescription, WorkerError, WorkerLost
from workers.terms import LinkTerms

T = TypeVar("T")

log = logging.getLogger(__name__)

LAUNCH_STAGE = "launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGroup:
    """A loaded group: a `runtime.link.LoadedGroup`.

    description: rank 0's, with the slots and pages that every rank has. ranks: each rank's own. places: where each is.
    epoch: which life of the group this is; goes into every plan.
    lost: set, with the reason, when any process or link is no more, whether or not a step is in flight.
    """

    link: GroupLink
    mesh: Mesh
    description: WorkerDescription
    ranks: tuple[WorkerDescription, ...]
    places: tuple[RankPlace, ...]
    epoch: int
    lost: asyncio.Future[str]


@dataclass(slots=True)
class _Rank:
    """What there is of a rank in the present life."""

    stage: str = LAUNCH_STAGE
    is_ready: bool = False
    launched: LaunchedWorker | None = None
    client: WorkerClient | None = None
    watchers: list[asyncio.Task[None]] = field(default_factory=list)


class GroupSupervisor:
    """A `runtime.link.GroupSource`. `start`, `restart` and `stop` are called one at a time."""

    def __init__(self, settings: ServeSettings, launcher: Launcher) -> None:
        self._settings = settings
        self._launcher = launcher
        self._mesh = Mesh.of(settings.parallel)
        self._progress: RankProgress = _ignore
        self._epoch = 0
        self._terms = LinkTerms.fresh(settings.cluster.tls)
        self._security: Security = PLAIN
        self._ranks: list[_Rank] = []
        self._obituary: asyncio.Task[None] | None = None

    @property
    def launched(self) -> tuple[LaunchedWorker, ...]:
        """The processes of the present life in rank order, for reports; fewer or none between lives."""
        return tuple(rank.launched for rank in self._ranks if rank.launched is not None)

    async def start(self, progress: RankProgress) -> RunningGroup:
        """Launches and loads all ranks at once; `progress` is kept for later lives.

        Raises LoadError when certificates cannot be used, a rank refuses what it is to load or ranks do not fit
        together, WorkerLost when one dies or `start_timeout_s` is over. They name the rank and its stage; the first
        failure counts. Nothing is left running then, nor when the call is cancelled.
        """
        self._progress = progress
        return await self._begin_life()

    async def restart(self, reason: str) -> RunningGroup:
        """Ends what is left of the present life, then begins the next. Raises as `start` does; may be tried again."""
        log.warning("the group of epoch %d is replaced: %s", self._epoch, reason)
        await self._end_life()
        return await self._begin_life()

    async def stop(self) -> None:
        """Ends all ranks and lets the launcher go. Idempotent. Raises WorkerError when a process outlives its kill."""
        if self._obituary is not None:
            self._obituary.cancel()
        try:
            await self._end_life()
        finally:
            await self._launcher.close()

    async def _begin_life(self) -> RunningGroup:
        assert not self._ranks, "the life before has not ended"
        self._epoch += 1
        self._terms = LinkTerms.fresh(self._settings.cluster.tls)
        try:
            self._security = self._terms.security(None)
        except CertificateProblem as error:
            raise LoadError(str(error)) from None
        self._ranks = [_Rank() for _ in range(self._mesh.size)]
        inquest = Inquest(self._mesh)
        timeout_s = self._settings.cluster.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._launch_and_load(inquest)
        except TimeoutError:
            text = f"the start took more than {timeout_s:g} s; not ready: {self._not_ready()}"
            await self._end_life()
            raise WorkerLost(text) from None
        except WorkerError as error:
            error = await self._explain(inquest.verdict.result()) if inquest.verdict.done() else error
            await self._end_life()
            raise error from None
        except BaseException:
            await self._end_life()
            raise

    async def _launch_and_load(self, inquest: Inquest) -> RunningGroup:
        settings = [worker_settings(self._settings, rank) for rank in range(self._mesh.size)]
        launched = await self._for_all(inquest, lambda rank: self._launch(rank, settings[rank], inquest))
        seats = [_seat(rank, each, launched[0]) for rank, each in enumerate(launched)]
        descriptions = await self._for_all(
            inquest,
            lambda rank: self._load(rank, settings[rank].model_copy(update={"seat": seats[rank]}), inquest),
        )
        description = merge_descriptions(self._mesh, descriptions)
        cluster = self._settings.cluster
        link = GroupLink(
            self._mesh,
            [rank.client for rank in self._ranks if rank.client is not None],
            inquest,
            step_timeout_s=cluster.step_timeout_s,
            checks=cluster.check_ranks,
        )
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ranks[0].watchers.append(asyncio.create_task(self._await_loss(inquest, lost)))
        log.info("%d ranks (%s) serve epoch %d", self._mesh.size, self._mesh, self._epoch)
        return RunningGroup(
            link=link,
            mesh=self._mesh,
            description=description,
            ranks=tuple(descriptions),
            places=tuple(RankPlace(name=each.name, address=each.address) for each in launched),
            epoch=self._epoch,
            lost=lost,
        )

    async def _for_all(self, inquest: Inquest, act: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
        return await inquest.together([asyncio.create_task(act(rank)) for rank in range(self._mesh.size)])

    async def _launch(self, rank: int, settings: WorkerSettings, inquest: Inquest) -> LaunchedWorker:
        self._advance(rank, LAUNCH_STAGE, 0, 1)
        launched = await self._launcher.launch(settings, self._epoch, self._terms)
        state = self._ranks[rank]
        state.launched = launched
        state.watchers.append(asyncio.create_task(_report_death(rank, launched, inquest)))
        self._advance(rank, LAUNCH_STAGE, 1, 1)
        log.info("%s of epoch %d: %s at %s", rank_name(self._mesh, rank), self._epoch, launched.name, launched.address)
        return launched

    async def _load(self, rank: int, settings: WorkerSettings, inquest: Inquest) -> WorkerDescription:
        state = self._ranks[rank]
        assert state.launched is not None
        state.client = client = WorkerClient(state.launched.address, self._terms, self._security)
        description = await client.load(settings, lambda *frame: self._advance(rank, *frame))
        state.is_ready = True
        state.watchers.append(asyncio.create_task(_report_break(rank, client, inquest)))
        return description

    def _advance(self, rank: int, stage: str, done: int, total: int) -> None:
        self._ranks[rank].stage = stage
        self._progress(rank, stage, done, total)

    def _not_ready(self) -> str:
        return ", ".join(
            f"{rank_name(self._mesh, rank)} at stage {state.stage!r}"
            for rank, state in enumerate(self._ranks)
            if not state.is_ready
        )

    async def _explain(self, verdict: Verdict) -> WorkerError:
        """Why a start failed: which rank, at which stage, and the last words of one that died."""
        if not verdict.ranks:
            return verdict.error
        rank = verdict.ranks[0]
        state = self._ranks[rank]
        words = ""
        if isinstance(verdict.error, RankDied) and state.launched is not None:
            words = await state.launched.last_words()
        text = f"{rank_name(self._mesh, rank)} failed at stage {state.stage!r}: {verdict.error}{words}"
        return LoadError(text) if isinstance(verdict.error, LoadError) else WorkerLost(text)

    async def _await_loss(self, inquest: Inquest, lost: asyncio.Future[str]) -> None:
        """The end of one is the end of all, for steps in flight too."""
        verdict = await asyncio.shield(inquest.verdict)
        reason = verdict.describe(self._mesh)
        for state in self._ranks:
            if state.client is not None:
                state.client.abandon(reason)
        lost.set_result(reason)
        if isinstance(verdict.error, RankDied):
            launched = self._ranks[verdict.ranks[0]].launched
            assert launched is not None
            # The log may be on another machine; the next life does not wait for it.
            self._obituary = asyncio.create_task(_write_obituary(reason, launched))

    async def _end_life(self) -> None:
        """In this order: no more news, no more links, no more processes; of each, all ranks' at once.

        What cannot be ended is kept, for the next attempt. Raises WorkerError when a process outlives its kill.
        """
        watchers = [watcher for state in self._ranks for watcher in state.watchers]
        for watcher in watchers:
            watcher.cancel()
        if watchers:
            await asyncio.wait(watchers)
        await asyncio.gather(*(state.client.close() for state in self._ranks if state.client is not None))
        for state in self._ranks:
            state.watchers, state.client = [], None
        alive = [state for state in self._ranks if state.launched is not None]
        outcomes = await asyncio.gather(*map(_kill, alive), return_exceptions=True)
        self._ranks = [state for state, outcome in zip(alive, outcomes, strict=True) if outcome is not None]
        for outcome in outcomes:
            if outcome is not None:
                raise outcome


def worker_settings(settings: ServeSettings, rank: int) -> WorkerSettings:
    """What a rank of a deployment is told before it is known where the ranks meet."""
    cluster = settings.cluster
    return WorkerSettings(
        model=settings.model,
        cache=settings.cache,
        speculation=settings.speculation,
        parallel=settings.parallel,
        seat=GroupSeat(rank=rank),
        max_step_tokens=settings.scheduler.max_step_tokens,
        threads=cluster.worker_threads,
        collectives=cluster.collectives,
        collective_timeout_s=cluster.step_timeout_s,
        check_ranks=cluster.check_ranks,
    )


def launcher_for(settings: ServeSettings) -> Launcher:
    """The launcher that `cluster.launcher` names."""
    if settings.cluster.launcher == "process":
        return ProcessLauncher(settings.cluster, settings.state_dir)
    from runtime.cluster.ray_launcher import RayLauncher

    return RayLauncher(settings.cluster, settings.state_dir)


def _seat(rank: int, launched: LaunchedWorker, first: LaunchedWorker) -> GroupSeat:
    store = first.store
    return GroupSeat(
        rank=rank,
        store_address=store.address if store is not None else None,
        store_fd=store.fd if store is not None and rank == 0 else None,
        bind_host=launched.host,
    )


async def _report_death(rank: int, launched: LaunchedWorker, inquest: Inquest) -> None:
    inquest.hear(rank, RankDied(await launched.wait_dead()))


async def _report_break(rank: int, client: WorkerClient, inquest: Inquest) -> None:
    inquest.hear(rank, LinkBroken(await asyncio.shield(client.lost)))


async def _write_obituary(reason: str, launched: LaunchedWorker) -> None:
    log.error("%s%s", reason, await launched.last_words())


async def _kill(state: _Rank) -> None:
    assert state.launched is not None
    await state.launched.kill()


def _ignore(rank: int, stage: str, done: int, total: int) -> None:
    pass
