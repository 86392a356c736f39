"""A rank as a Ray actor: on a cluster that is there, or on a local Ray started for it. Knows no gRPC and no model.

Ray ties the daemons of a local cluster to the thread that started them, so one thread makes all blocking Ray calls and
lives as long as the launcher. Steps do not pass through Ray; the actor opens the same service as a child process does.

When we are killed, the daemons and the rank go within seconds. Two of Ray's agents (DashboardAgent, RuntimeEnvAgent)
stay for one minute: each tries that long to report the loss to a server that is lost too, and no setting shortens it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from configs.schema import ClusterSettings, WorkerSettings
from runtime.cluster.launcher import KILL_TIMEOUT_S, log_path, tail_of, worker_environment
from workers.actor import ActorAddress, WorkerActor
from workers.channel import LOOPBACK
from workers.main import DEFAULT_FACTORY
from workers.plan import WorkerError, WorkerLost

T = TypeVar("T")

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's least; nothing large passes through it."""

POLITE_S = 1.0
"""How long Ray may take to end an actor its own way; a process killed from outside is a crash to Ray, and reported."""

_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no reports to Ray's makers
    # Ray's handler would print a stop signal as a crash, with a stack, before ours acts on it.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; the present one comes with a warning
}
_LOCAL = {
    # By the name of this variable: whether this machine is to be one of many. If not, daemons listen on loopback only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Idle processes made in advance have not the environment that a rank needs.
    "RAY_prestart_worker_first_driver": "0",
}


def start_ray(cluster: ClusterSettings, *, num_cpus: int, namespace: str) -> bool:
    """Joins the cluster at `ray_address`, or starts a local one of `num_cpus` that ends with the calling thread.

    False, and nothing done, where this process has Ray already. Blocks for seconds. Ray reads its environment when it
    is imported, hence the import here and nowhere before.
    """
    os.environ.update(_ALWAYS)
    if not cluster.ray_address:
        # On a busy machine Ray's patience with its first server, 30 s, may not do; ours goes for the whole start.
        os.environ.update({**_LOCAL, "RAY_gcs_server_port_wait_time_s": str(math.ceil(cluster.start_timeout_s))})
    import ray

    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": "ERROR"}
    if cluster.ray_address:
        ray.init(address=cluster.ray_address, **quiet)
    else:
        with _without_api_server():
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **quiet,
            )
    return True


@contextlib.contextmanager
def _without_api_server() -> Iterator[None]:
    """Keeps a Ray that starts here from starting its API server, and goes on as Ray does where that server fails.

    Without a dashboard one module is left in that server, the usage reporter. It asks the metadata addresses of clouds
    whose machine this is before it looks whether reports are wanted, and nothing here may leave the machine. No
    setting of Ray leaves the server out, hence its own function is replaced. Where a later Ray has no such function,
    the start fails rather than talks.
    """
    from ray._private import services

    start_api_server = services.start_api_server
    services.start_api_server = lambda *_arguments, **_options: (None, None)
    try:
        yield
    finally:
        services.start_api_server = start_api_server


class ActorWorker:
    """A `LaunchedWorker`. On our own machine its process is held by a file descriptor, which names it and no later one
    of the same number; elsewhere Ray's word has to do. `stay` is the actor's call that ends with the actor."""

    def __init__(self, actor: Any, opened: ActorAddress, log: Path | None, *, stay: Any, is_local: bool) -> None:
        self.address = opened.address
        self.pid = opened.pid
        self.name = f"Ray actor {actor._actor_id.hex()[:8]}, process {opened.pid}"
        self._actor = actor
        self._log = log
        self._pidfd = _hold_process(opened.pid) if is_local else None
        self._death = asyncio.create_task(self._await_death(stay))

    async def wait_dead(self) -> str:
        return await asyncio.shield(self._death)

    async def kill(self) -> None:
        import ray

        # Ray asks the process to leave, and one that is stopped does not hear it.
        await asyncio.to_thread(ray.kill, self._actor)
        await asyncio.wait({self._death}, timeout=POLITE_S)
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        await asyncio.wait({self._death}, timeout=KILL_TIMEOUT_S)
        if not self._death.done():
            raise WorkerError(f"{self.name} is still there {KILL_TIMEOUT_S:g} s after it was killed")

    def log_tail(self) -> str:
        return tail_of(self._log) if self._log is not None else ""

    async def _await_death(self, stay: Any) -> str:
        from ray.exceptions import RayError

        reason = "it returned"
        try:
            await stay
        except RayError as error:
            reason = _first_line(error)
        if self._pidfd is not None:
            await _readable(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        return f"{self.name} ended: {reason}"


class RayLauncher:
    """A `Launcher`. Ranks of a local Ray log to state_dir/logs, those of a cluster to Ray. `factory` names what loads
    the worker."""

    def __init__(self, cluster: ClusterSettings, state_dir: Path, *, factory: str = DEFAULT_FACTORY) -> None:
        self._cluster = cluster
        self._state_dir = state_dir
        self._factory = factory
        self._namespace = f"outrider-{uuid.uuid4().hex[:12]}"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._began_ray = False

    async def launch(self, settings: WorkerSettings, epoch: int) -> ActorWorker:
        await self._in_thread(lambda: self._start(settings))
        import ray
        from ray.exceptions import RayError

        is_one_machine = self._cluster.ray_address is None
        log = log_path(self._state_dir, settings, epoch) if is_one_machine else None
        actor = await self._in_thread(lambda: _make_actor(settings))
        try:
            opened: ActorAddress = await actor.open.remote(
                factory=self._factory,
                epoch=epoch,
                bind_host=self._cluster.worker_bind_host or (LOOPBACK if is_one_machine else None),
                advertise_host=self._cluster.worker_advertise_host,
                ports=(self._cluster.worker_port_min, self._cluster.worker_port_max),
                log_path=log,
            )
        except RayError as error:
            ray.kill(actor)
            raise WorkerLost(f"the Ray actor did not serve: {error}") from None
        except BaseException:
            ray.kill(actor)
            raise
        is_local = opened.node_id == ray.get_runtime_context().get_node_id()
        return ActorWorker(actor, opened, log, stay=actor.stay.remote(), is_local=is_local)

    async def close(self) -> None:
        """Leaves Ray, and ends it, where this launcher started it. Waits for a start that is under way."""
        await self._in_thread(self._leave)

    def _start(self, settings: WorkerSettings) -> None:
        if start_ray(self._cluster, num_cpus=settings.threads, namespace=self._namespace):
            self._began_ray = True

    def _leave(self) -> None:
        if self._began_ray:
            import ray

            ray.shutdown()
            self._began_ray = False

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _make_actor(settings: WorkerSettings) -> Any:
    """An actor that Ray never restarts (a rank comes back in a new epoch, by the supervisor) and that dies with us."""
    import ray

    device = settings.model.device
    wants_gpu = device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)  # type: ignore[no-untyped-call]
    options = {
        "num_cpus": settings.threads,
        "num_gpus": 1 if wants_gpu else 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": worker_environment(settings, os.environ)},
    }
    return ray.remote(WorkerActor).options(**options).remote()


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


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
