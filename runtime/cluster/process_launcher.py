"""A rank as a child process of the runtime, without Ray. Knows no gRPC and no model.

The two ends share a socket pair, the lifeline. The child says its address on it, then waits for its end: the kernel
closes our side when we die, however we die, and the child follows.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from configs.schema import ClusterSettings, WorkerSettings
from runtime.cluster.launcher import KILL_TIMEOUT_S, log_path, tail_of, worker_environment
from workers.channel import LOOPBACK
from workers.main import DEFAULT_FACTORY
from workers.plan import WorkerError, WorkerLost


class ChildWorker:
    """A `LaunchedWorker`. Holds the lifeline: the child ends when this object is gone, too."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, log: Path, lifeline: socket.socket) -> None:
        self.address = address
        self.pid = process.pid
        self.name = f"process {process.pid}"
        self._process = process
        self._log = log
        self._lifeline = lifeline

    async def wait_dead(self) -> str:
        return f"{self.name} {_describe_exit(await self._process.wait())}"

    async def kill(self) -> None:
        await _kill(self._process)
        self._lifeline.close()

    def log_tail(self) -> str:
        return tail_of(self._log)


class ProcessLauncher:
    """A `Launcher` for one machine. Logs go to state_dir/logs. `factory` names what loads the worker."""

    def __init__(self, cluster: ClusterSettings, state_dir: Path, *, factory: str = DEFAULT_FACTORY) -> None:
        self._cluster = cluster
        self._state_dir = state_dir
        self._factory = factory

    async def launch(self, settings: WorkerSettings, epoch: int) -> ChildWorker:
        log = log_path(self._state_dir, settings, epoch)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs, log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "workers.main", *self._options(epoch, theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(),),
                    # PYTHONSAFEPATH: a folder that happens to be called "workers" where we stand is none of ours.
                    env={**os.environ, **worker_environment(settings, os.environ), "PYTHONSAFEPATH": "1"},
                    # In a session of its own a rank is spared the terminal's Ctrl-C, which is for us to act upon.
                    start_new_session=True,
                )
            try:
                address = await _read_line(ours)
                if not address:
                    reason = _describe_exit(await process.wait())
                    raise WorkerLost(f"process {process.pid} {reason} before it served; its log ends:\n{tail_of(log)}")
            except BaseException:
                await _kill(process)
                raise
        except BaseException:
            ours.close()
            raise
        return ChildWorker(process, address, log, ours)

    async def close(self) -> None:
        """Children share nothing."""

    def _options(self, epoch: int, lifeline_fd: int) -> list[str]:
        options = {
            "--lifeline-fd": lifeline_fd,
            "--epoch": epoch,
            "--bind-host": self._cluster.worker_bind_host or LOOPBACK,
            "--advertise-host": self._cluster.worker_advertise_host,
            "--port-min": self._cluster.worker_port_min,
            "--port-max": self._cluster.worker_port_max,
            "--factory": self._factory,
        }
        return [f"{name}={value}" for name, value in options.items() if value is not None]


async def _read_line(connection: socket.socket) -> str:
    """The line that arrives on a non-blocking socket, without its end; empty when the other side closes before."""
    loop = asyncio.get_running_loop()
    received = b""
    while not received.endswith(b"\n"):
        try:
            chunk = await loop.sock_recv(connection, 1024)
        except ConnectionError:
            return ""
        if not chunk:
            return ""
        received += chunk
    return received.decode().strip()


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)  # with whatever it started
    try:
        async with asyncio.timeout(KILL_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        raise WorkerError(f"process {process.pid} is still there {KILL_TIMEOUT_S:g} s after SIGKILL") from None


def _describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with status {returncode}"
    return f"was killed by {signal.Signals(-returncode).name}"
