"""Ranks as Ray actors: on a cluster that is there, or on a local Ray started for them. Knows no gRPC and no model.

Steps do not pass through Ray; an actor opens the same service as a child process does. A deployment has a namespace of
its own, `outrider-<id>`; in it an actor is called `rank-<r>-epoch-<e>`, and its placement groups `outrider-<id>-dp<d>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from configs.schema import ClusterSettings, WorkerSettings
from parallel.mesh import Mesh
from runtime.cluster.launcher import (
    KILL_TIMEOUT_S,
    LOG_TIMEOUT_S,
    RankDied,
    keeps_store,
    last_words,
    log_path,
    read_tail,
    worker_environment,
)
from runtime.cluster.ray_placement import Placement
from runtime.cluster.ray_session import PART_TIMEOUT_S, RaySession
from workers.actor import OpenedActor, WorkerActor
from workers.channel import LOOPBACK
from workers.main import DEFAULT_FACTORY
from workers.plan import WorkerError, WorkerLost
from workers.terms import LinkTerms

log = logging.getLogger(__name__)

POLITE_S = 1.0
"""How long Ray may take to end an actor its own way; a process killed from outside is a crash to Ray, and reported."""

REACH_TIMEOUT_S = 5.0
"""How long the server of a cluster may take to accept a connection."""

CLOSE_TIMEOUT_S = 4.0
"""How long Ray may take to let go at the end: twice this for a local one, which needs 7 s when its server is gone."""

PATIENCE_SHARE = 0.5
"""Part of the start timeout in which a cluster must let us in, or a place be found: what is left is for the rest of the
start, and for the error to arrive before the timeout does."""


class ActorWorker:
    """A `LaunchedWorker`. On our own machine its process is held by a file descriptor, which names it and no later one
    of the same number; elsewhere Ray's word has to do. `stay` is the actor's call that ends with the actor."""

    def __init__(
        self, session: RaySession, actor: Any, found: OpenedActor, name: str, environment: dict[str, str], *, stay: Any
    ) -> None:
        import ray

        self.address, self.host, self.store = found.opened.address, found.opened.host, found.opened.store
        self.pid = found.pid
        self.name = f"Ray actor {name}, process {found.pid}"
        self._session = session
        self._actor = actor
        self._found = found
        self._environment = environment
        self._is_local = found.node_id == ray.get_runtime_context().get_node_id()
        self._pidfd = _hold_process(found.pid) if self._is_local else None
        self._death = asyncio.create_task(self._await_death(stay))

    async def wait_dead(self) -> str:
        return await asyncio.shield(self._death)

    async def kill(self) -> None:
        import ray

        # Ray asks the process to leave, and one that is stopped does not hear it; a Ray that is lost hears nothing.
        with contextlib.suppress(WorkerLost):
            await self._session.call(lambda: ray.kill(self._actor), limit_s=PART_TIMEOUT_S)
        await asyncio.wait({self._death}, timeout=POLITE_S)
        self._kill_process()
        if self._pidfd is None and not self._death.done():
            await self._session.is_well()  # a server that hangs takes the request, and does nothing
        await asyncio.wait({self._death}, timeout=KILL_TIMEOUT_S)
        if not self._death.done():
            raise WorkerError(f"{self.name} is still there {KILL_TIMEOUT_S:g} s after it was killed")

    async def last_words(self) -> str:
        path = self._found.log
        if self._is_local:
            return last_words(read_tail(path), str(path))
        where = f"{path} on node {self.host}"
        try:
            async with asyncio.timeout(LOG_TIMEOUT_S):
                tail: bytes = await (await self._session.call(self._start_reading))
        except Exception:  # whatever keeps us from the log: the end of the rank is the news
            return f"; its log is {where}"
        return last_words(tail, where)

    def _start_reading(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node_id=self._found.node_id, soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": there, "runtime_env": {"env_vars": self._environment}}
        return ray.remote(read_tail).options(**options).remote(self._found.log)

    def _kill_process(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _await_death(self, stay: Any) -> str:
        """The process, Ray and the session are asked at once: each may be the first to know, or the only one."""
        told = asyncio.create_task(_reason_of(stay))
        gone = asyncio.create_task(_readable(self._pidfd)) if self._pidfd is not None else None
        heard: set[asyncio.Future[Any]] = {told, self._session.lost}
        await asyncio.wait(heard if gone is None else {*heard, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone is not None:
            if not self._session.lost.done():  # what Ray ends leaves by itself
                await asyncio.wait({gone}, timeout=POLITE_S)
            self._kill_process()
            await gone
            assert self._pidfd is not None
            os.close(self._pidfd)
            self._pidfd = None
        reason = "its process is gone"  # Ray says no more of it, and says it later
        if self._session.lost.done():
            reason = self._session.lost.result()
        elif told.done():
            reason = told.result()
        told.cancel()
        return f"{self.name} ended: {reason}"


class RayLauncher:
    """A `Launcher`. Ranks on one machine log to state_dir/logs, those of a cluster to the folder of Ray's logs on their
    node. `factory` names what loads the worker.

    A Ray that is lost is left before the next life: a local one is ended and another started, a cluster joined anew.
    """

    def __init__(self, cluster: ClusterSettings, state_dir: Path, *, factory: str = DEFAULT_FACTORY) -> None:
        self._cluster = cluster
        self._state_dir = state_dir
        self._factory = factory
        self._namespace = f"outrider-{uuid.uuid4().hex[:12]}"
        self._session: RaySession | None = None
        self._placement: Placement | None = None
        self._preparation: tuple[int, asyncio.Task[tuple[RaySession, Placement]]] | None = None

    async def launch(self, settings: WorkerSettings, epoch: int, terms: LinkTerms) -> ActorWorker:
        session, placement = await self._prepared(settings, epoch)
        rank = settings.seat.rank
        name = f"rank-{rank}-epoch-{epoch}"
        environment = worker_environment(settings, os.environ)
        options = _actor_options(placement, rank, name, self._namespace, environment)
        making = asyncio.create_task(session.call(lambda: _make_actor(options)))
        try:
            actor = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(partial(_undo, session))
            raise
        try:
            found = await self._open(session, actor, settings, epoch, terms)
            return ActorWorker(session, actor, found, name, environment, stay=actor.stay.remote())
        except BaseException:
            _kill(session, actor)
            raise

    async def close(self) -> None:
        """Gives the resources back, leaves Ray, and ends it where this launcher started it. Waits for a start of a
        local Ray that is under way. A Ray that does not let go is logged and given up."""
        if self._placement is not None:
            with contextlib.suppress(WorkerLost):
                await self._placement.remove()
            self._placement = None
        if self._session is not None:
            try:
                await self._session.leave(limit_s=CLOSE_TIMEOUT_S)
            except WorkerLost as error:
                log.error("%s", error)
            self._session = None

    async def _prepared(self, settings: WorkerSettings, epoch: int) -> tuple[RaySession, Placement]:
        """Ray and a place in it, prepared once in a life for all its ranks; who gives up gives up for all."""
        if self._preparation is None or self._preparation[0] != epoch:
            self._preparation = epoch, asyncio.create_task(self._prepare(settings))
        task = self._preparation[1]
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise

    async def _prepare(self, settings: WorkerSettings) -> tuple[RaySession, Placement]:
        mesh = Mesh.of(settings.parallel)
        if self._session is not None and not await self._session.is_well():
            await self._leave(self._session)
        if self._session is None:
            num_cpus = mesh.size * settings.threads
            self._session = RaySession(self._cluster, num_cpus=num_cpus, namespace=self._namespace)
        session = self._session
        try:
            await self._enter(session)
            if self._placement is not None and not await self._placement.is_whole():
                await self._placement.remove()
                self._placement = None
            if self._placement is None:
                self._placement = await Placement.make(
                    session,
                    mesh,
                    threads=settings.threads,
                    device=settings.model.device,
                    name=self._namespace,
                    timeout_s=self._patience_s,
                )
        except WorkerLost:
            if session.lost.done():  # at once: what still waits in it would end the process if another server came
                await self._leave(session)
            raise
        return session, self._placement

    async def _leave(self, session: RaySession) -> None:
        await session.leave()
        self._session = self._placement = None

    @property
    def _patience_s(self) -> float:
        return self._cluster.start_timeout_s * PATIENCE_SHARE

    async def _enter(self, session: RaySession) -> None:
        """A local Ray may take the whole of the start; a cluster that is there needs a second."""
        address = self._cluster.ray_address
        if address is not None:
            await _check_reachable(address)
        try:
            async with asyncio.timeout(None if address is None else self._patience_s):
                await session.enter()
        except TimeoutError:
            raise WorkerLost(
                f"the Ray cluster at {address} did not let us in for {self._patience_s:g} s; check cluster.ray_address "
                "and that this machine is a node of that cluster (`ray status`)"
            ) from None

    async def _open(
        self, session: RaySession, actor: Any, settings: WorkerSettings, epoch: int, terms: LinkTerms
    ) -> OpenedActor:
        from ray.exceptions import RayError

        is_one_machine = self._cluster.ray_address is None
        log = log_path(self._state_dir, settings, epoch) if is_one_machine else Path(self._log_name(settings, epoch))
        answer = actor.open.remote(
            factory=self._factory,
            epoch=epoch,
            # To a method, not to the constructor: what constructors are given is kept by Ray's server.
            terms=terms,
            bind_host=self._cluster.worker_bind_host or (LOOPBACK if is_one_machine else None),
            advertise_host=self._cluster.worker_advertise_host,
            ports=(self._cluster.worker_port_min, self._cluster.worker_port_max),
            keeps_store=keeps_store(settings),
            log_path=log,
        )
        opening = asyncio.ensure_future(_value(answer))
        try:
            await asyncio.wait({opening, session.lost}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                raise WorkerLost(session.lost.result())
            found: OpenedActor = opening.result()
            return found
        except RayError as error:
            where = f"; its log is {log}" if is_one_machine else ""
            raise RankDied(f"the Ray actor did not serve: {_cause(error)}{where}") from None
        finally:
            opening.cancel()

    def _log_name(self, settings: WorkerSettings, epoch: int) -> str:
        return f"{self._namespace}-rank{settings.seat.rank}-epoch{epoch}.log"


async def _check_reachable(address: str) -> None:
    """Raises WorkerLost where nothing listens at host:port: Ray would wait for it, and not to be interrupted. Other
    forms of an address (`auto`) are left to Ray."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError as error:  # TimeoutError among them
        why = error.strerror or "no answer"
        raise WorkerLost(
            f"no Ray cluster at {address}: {why}; check cluster.ray_address, and that the cluster is up (`ray status`)"
        ) from None
    writer.close()


def _actor_options(
    placement: Placement, rank: int, name: str, namespace: str, environment: dict[str, str]
) -> dict[str, Any]:
    """An actor that Ray never restarts (a rank comes back in a new epoch, by the supervisor) and that dies with us."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group, bundle_index = placement.of_rank(rank)
    return {
        "name": name,
        "namespace": namespace,
        "num_cpus": placement.bundle["CPU"],
        "num_gpus": placement.bundle.get("GPU", 0),
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle_index
        ),
        "runtime_env": {"env_vars": environment},
    }


def _make_actor(options: dict[str, Any]) -> Any:
    import ray

    return ray.remote(WorkerActor).options(**options).remote()


def _undo(session: RaySession, making: asyncio.Task[Any]) -> None:
    if not making.cancelled() and making.exception() is None:
        _kill(session, making.result())


def _kill(session: RaySession, actor: Any) -> None:
    """Has Ray asked to end an actor; does not wait."""
    import ray

    session.post(lambda: ray.kill(actor))


async def _value(reference: Any) -> Any:
    return await reference


async def _reason_of(stay: Any) -> str:
    from ray.exceptions import RayError

    try:
        await stay
    except RayError as error:
        return _first_line(error)
    return "it returned"


def _hold_process(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


def _cause(error: Exception) -> str:
    """What an actor raised, without Ray's copy of its stack; Ray's first line where it says no more."""
    cause = getattr(error, "cause", None)
    return f"{type(cause).__name__}: {cause}" if cause is not None else _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
