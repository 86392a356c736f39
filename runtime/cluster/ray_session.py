"""Being in Ray: joined to a cluster or with a local one of our own, and out again, whatever becomes of its daemons.
Knows no ranks.

Ray ties the daemons of a local cluster to the thread that started them, so one thread makes all blocking Ray calls and
lives as long as the session. A call that Ray does not answer in time ends the session: Ray's own way is to wait for its
server for ever, or to end the process that waits.

When this process is killed, the daemons and the ranks go within seconds. Two of Ray's agents (DashboardAgent,
RuntimeEnvAgent) stay for one minute: each tries that long to report the loss to a server that is lost too, and no
setting shortens it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from configs.schema import ClusterSettings
from workers.address import join_address
from workers.plan import WorkerLost

T = TypeVar("T")

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's least; nothing large passes through it."""

CALL_TIMEOUT_S = 20.0
"""Longest call to Ray's server. Those that are made take milliseconds."""

PROBE_TIMEOUT_S = 5.0
"""How long a session may take to show that it is alive, before a life is begun in it."""

LEAVE_TIMEOUT_S = 30.0
"""Longest wait for Ray to let go before another session. It takes 1 s where its cluster is well, and 7 s where its
server is gone."""

PART_TIMEOUT_S = 3.0
"""Longest wait for a Ray that is on the way out: what it is asked then is a courtesy."""

_WATCHED_DAEMONS = ("gcs_server", "raylet")

_CALLER_NAME = "ray-session"

_END_TIMEOUT_S = 0.5
"""Longest wait for the end of a thread that is in no call, and of processes that were killed."""

_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no reports to Ray's makers
    # Ray's handler would print a stop signal as a crash, with a stack, before ours acts on it.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; the present one comes with a warning
    # A process that misses its server for a minute is ended by Ray. Ours leaves that Ray and goes on.
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(10**6),
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
    # Ray takes a process whose parent is process 1 for a rank whose daemon has died, and ends it, unless it names a
    # daemon that lives.
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
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
    # What Ray prints all the same: the last words of a raylet, a page of them. Its debugger turns them off this way.
    worker: Any = ray._private.worker
    worker._worker_logs_enabled = False
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


class RaySession:
    """From an entry into Ray to the exit. Belongs to the event loop it was made in.

    lost: set, with the reason, when a daemon of a local Ray is gone or a call was not answered. The session is then to
    be left; another may be entered after that.
    """

    def __init__(self, cluster: ClusterSettings, *, num_cpus: int, namespace: str) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._cluster = cluster
        self._num_cpus = num_cpus
        self._namespace = namespace
        self._caller = _Caller()
        self._is_ours = False
        self._pidfds: list[int] = []
        self._folder: Path | None = None
        self._entry: asyncio.Task[None] | None = None
        self._exit: asyncio.Task[None] | None = None

    async def enter(self) -> None:
        """Starts or joins Ray, once; may be awaited by many, and again after it was cancelled.

        Raises WorkerLost with Ray's reason; the session is then lost.
        """
        if self._entry is None:
            self._entry = asyncio.create_task(self._enter())
        await asyncio.shield(self._entry)

    async def call(self, act: Callable[[], T], *, limit_s: float = CALL_TIMEOUT_S) -> T:
        """Has the session's thread make a blocking call. Raises what it raises, and WorkerLost when the session is lost
        or becomes so because there is no answer after `limit_s`."""
        if self.lost.done():
            raise WorkerLost(self.lost.result())
        answer = self._caller.submit(act)
        either: set[asyncio.Future[Any]] = {answer, self.lost}
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        self._lose(f"Ray did not answer within {limit_s:g} s; is its cluster well?")
        raise WorkerLost(self.lost.result())

    def post(self, act: Callable[[], object]) -> None:
        """Has the session's thread make a blocking call that nobody waits for; its errors are of no interest."""
        self._caller.submit(act)

    async def is_well(self) -> bool:
        """Whether the session is of use: it is being entered still, or the very server that it entered answers, and so
        does this machine's raylet.

        Asked with a deadline, and by the one client that says so when a new server has taken the old one's place: most
        of Ray's calls end the process then.
        """
        if self._entry is None or not self._entry.done():
            return True

        def ask() -> str:
            import ray

            worker: Any = ray._private.worker.global_worker
            worker.gcs_client.internal_kv_exists(b"outrider", timeout=PROBE_TIMEOUT_S)
            return join_address(worker.node.node_ip_address, worker.node.node_manager_port)

        try:
            await _check_answers(await self.call(ask))
        except Exception as error:  # Ray's errors are of many kinds
            self._lose(f"Ray does not answer: {error}")
            return False
        return True

    async def leave(self, *, limit_s: float = LEAVE_TIMEOUT_S) -> None:
        """Leaves Ray where this session entered it, and ends it where it was started here. Waits for an entry that is
        under way. There is one exit, however often it is asked for.

        Raises WorkerLost when Ray has not let go after `limit_s`, or twice that of a local Ray, which is killed in
        between. The exit goes on then.
        """
        if self._entry is not None:
            # What starts a local Ray cannot be interrupted, and must be undone.
            entry_limit_s = limit_s if self._cluster.ray_address else self._cluster.start_timeout_s
            await asyncio.wait({self._entry}, timeout=entry_limit_s)
            if not self._entry.done():
                raise WorkerLost("Ray is still being entered")
        if self._exit is None or (self._exit.done() and self._exit.exception()):
            self._exit = asyncio.create_task(self._leave())
        await asyncio.wait({self._exit}, timeout=limit_s)
        if not self._exit.done():
            reason = f"Ray has not let go after {limit_s:g} s"
            self._lose(reason)
            if self._pidfds:
                await asyncio.wait({self._exit}, timeout=limit_s)
            if not self._exit.done():
                self._sweep()
                raise WorkerLost(reason)
        self._exit.result()

    async def _enter(self) -> None:
        def start() -> tuple[bool, Path | None, dict[int, str]]:
            if not start_ray(self._cluster, num_cpus=self._num_cpus, namespace=self._namespace):
                return False, None, {}
            import ray

            if self._cluster.ray_address:
                return True, None, {}
            node: Any = ray._private.worker._global_node
            daemons = {info.process.pid: name for name in _WATCHED_DAEMONS for info in node.all_processes[name]}
            return True, Path(node.get_session_dir_path()), daemons

        where = self._cluster.ray_address or "this machine"
        try:
            self._is_ours, self._folder, daemons = await self._caller.submit(start)
        # Ray's errors are of many kinds: ConnectionError, RuntimeError, ValueError, its own.
        except Exception as error:
            self._lose(f"Ray at {where} cannot be had: {error}")
            raise WorkerLost(self.lost.result()) from error
        for pid, name in daemons.items():
            self._watch(pid, name)

    def _watch(self, pid: int, name: str) -> None:
        pidfd = os.pidfd_open(pid)  # a child of ours: it keeps its number until Ray has been left

        def report() -> None:
            asyncio.get_running_loop().remove_reader(pidfd)
            self._lose(f"Ray's {name} (process {pid}) is gone")

        self._pidfds.append(pidfd)
        asyncio.get_running_loop().add_reader(pidfd, report)

    def _unwatch(self) -> None:
        for pidfd in self._pidfds:
            asyncio.get_running_loop().remove_reader(pidfd)

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            log.error("%s", reason)
            self.lost.set_result(reason)
        # Ray waits for a server that hangs for as long as it does, but not for one that is dead.
        for pidfd in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _sweep(self) -> None:
        if self._folder is not None:
            _kill_leftovers(self._folder)

    async def _leave(self) -> None:
        self._unwatch()
        if self._is_ours:
            import ray

            # A thread that waits for a lost server is of no more use.
            caller = _Caller() if self.lost.done() else self._caller
            answer = caller.submit(ray.shutdown)
            caller.end()
            try:
                await answer
            except Exception as error:  # Ray's errors are of many kinds
                self._lose(f"Ray cannot be left: {error}")
                raise WorkerLost(self.lost.result()) from error
            self._is_ours = False
        self._caller.end()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds = []
        self._sweep()


async def _check_answers(address: str) -> None:
    """Raises WorkerLost where a raylet hangs: nothing ever starts there, and its server takes a minute to see it.

    Any answer will do, a refusal too: whether a raylet is there at all is the server's to know.
    """
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        try:
            await health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise WorkerLost(f"its raylet at {address} said nothing for {PROBE_TIMEOUT_S:g} s") from None


def is_held() -> bool:
    """Whether a thread of a session is in a call to Ray that does not return. Ray's own exit would wait for it."""
    callers = [thread for thread in threading.enumerate() if thread.name == _CALLER_NAME]
    for thread in callers:
        thread.join(_END_TIMEOUT_S)
    return any(thread.is_alive() for thread in callers)


class _Caller:
    """A thread that makes one call after the other; where a call hangs, it does not keep us from ending."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=_CALLER_NAME, daemon=True).start()

    def submit(self, act: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(result)  # type: ignore[arg-type]
            else:
                answer.set_exception(error)
                answer.exception()  # whoever asked may have gone

        def call() -> None:
            result, error = None, None
            try:
                result = act()
            # Ray raises SystemExit in a call that its shutdown cuts short.
            except BaseException as raised:
                error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
                loop.call_soon_threadsafe(settle, result, error)

        self._calls.put(call)
        return answer

    def end(self) -> None:
        """After the calls that were submitted."""
        self._calls.put(None)

    def _run(self) -> None:
        while call := self._calls.get():
            call()


def _kill_leftovers(folder: Path) -> None:
    """Ends what a local Ray left behind: its programs and the Python processes that have files of its session open.
    Blocks until they are gone, which takes milliseconds."""
    import ray

    programs = (os.path.realpath(sys.executable), str(Path(ray.__file__).parent.resolve()))
    with contextlib.ExitStack() as held:
        killed = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError), contextlib.ExitStack() as holding:
                # Held by a descriptor before it is looked at: a number may change hands in between.
                pidfd = os.pidfd_open(int(entry.name))
                holding.callback(os.close, pidfd)
                is_ray = str((entry / "exe").readlink()).startswith(programs)
                if is_ray and any(link.readlink().is_relative_to(folder) for link in (entry / "fd").iterdir()):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    killed.append(pidfd)
                    held.push(holding.pop_all())
        deadline = time.monotonic() + _END_TIMEOUT_S
        for pidfd in killed:
            gone = select.poll()  # unlike select, for descriptors of any number
            gone.register(pidfd, select.POLLIN)
            gone.poll(max(0.0, deadline - time.monotonic()) * 1e3)
