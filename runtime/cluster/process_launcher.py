"""A rank as a child process of the runtime, without Ray. Knows no gRPC and no model.

The two ends share a socket pair, the lifeline. The child is told on it what its callers must know, says on it where it
is, then waits for its end: the kernel closes our side when we die, however we die, and the child follows.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from configs.schema import ClusterSettings, WorkerSettings
from runtime.cluster.launcher import (
    KILL_TIMEOUT_S,
    RankDied,
    keeps_store,
    last_words,
    log_path,
    read_tail,
    worker_environment,
)
from workers.channel import LOOPBACK
from workers.main import DEFAULT_FACTORY, opened_from_line, terms_to_line
from workers.opening import OpenedRank
from workers.plan import LoadError, WorkerError
from workers.terms import LinkTerms


class ChildWorker:
    """A `LaunchedWorker`. Holds the lifeline: the child ends when this object is gone, too."""

    def __init__(
        self, process: asyncio.subprocess.Process, opened: OpenedRank, log: Path, lifeline: socket.socket
    ) -> None:
        self.address, self.host, self.store = opened.address, opened.host, opened.store
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

    async def last_words(self) -> str:
        return last_words(read_tail(self._log), str(self._log))


class ProcessLauncher:
    """A `Launcher` for one machine. Logs go to state_dir/logs. `factory` names what loads the worker."""

    def __init__(self, cluster: ClusterSettings, state_dir: Path, *, factory: str = DEFAULT_FACTORY) -> None:
        self._cluster = cluster
        self._state_dir = state_dir
        self._factory = factory

    async def launch(self, settings: WorkerSettings, epoch: int, terms: LinkTerms) -> ChildWorker:
        log = log_path(self._state_dir, settings, epoch)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            ours.sendall(terms_to_line(terms))  # waits in the socket, which is empty, until the child reads it
            with theirs, log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "workers.main", *self._options(settings, epoch, theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(),),
                    # PYTHONSAFEPATH: a folder that happens to be called "workers" where we stand is none of ours.
                    env={
                        **os.environ,
                        **worker_environment(settings, os.environ),
                        **gpu_environment(settings, os.environ, count_gpus()),
                        "PYTHONSAFEPATH": "1",
                    },
                    # In a session of its own a rank is spared the terminal's Ctrl-C, which is for us to act upon.
                    start_new_session=True,
                )
            try:
                line = await _read_line(ours)
                if not line:
                    reason = _describe_exit(await process.wait())
                    raise RankDied(
                        f"process {process.pid} {reason} before it served{last_words(read_tail(log), str(log))}"
                    )
            except BaseException:
                await _kill(process)
                raise
        except BaseException:
            ours.close()
            raise
        return ChildWorker(process, opened_from_line(line), log, ours)

    async def close(self) -> None:
        """Children share nothing."""

    def _options(self, settings: WorkerSettings, epoch: int, lifeline_fd: int) -> list[str]:
        options = {
            "--lifeline-fd": lifeline_fd,
            "--epoch": epoch,
            "--bind-host": self._cluster.worker_bind_host or LOOPBACK,
            "--advertise-host": self._cluster.worker_advertise_host,
            "--port-min": self._cluster.worker_port_min,
            "--port-max": self._cluster.worker_port_max,
            "--factory": self._factory,
        }
        told = [f"{name}={value}" for name, value in options.items() if value is not None]
        return [*told, "--keeps-store"] if keeps_store(settings) else told


def gpu_environment(settings: WorkerSettings, inherited: Mapping[str, str], num_gpus: int) -> dict[str, str]:
    """What makes a rank of several see one GPU of this machine and no other rank's, as Ray does for its actors.

    num_gpus: those of the machine; CUDA_VISIBLE_DEVICES may leave us fewer. Raises LoadError when there are some, but
    not one for each rank.
    """
    size, rank = settings.parallel.dp * settings.parallel.tp, settings.seat.rank
    if size == 1 or settings.model.device == "cpu":
        return {}
    listed = inherited.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(num_gpus)] if listed is None else [name for name in listed.split(",") if name]
    if not names:
        return {}
    if len(names) < size:
        raise LoadError(
            f"{size} ranks need a GPU each, and this process may use {len(names)}; lower parallel.tp or dp, or "
            "set model.device to cpu"
        )
    return {"CUDA_VISIBLE_DEVICES": names[rank]}


def count_gpus() -> int:
    """NVIDIA GPUs of this machine, by their device files."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))


async def _read_line(connection: socket.socket) -> bytes:
    """The line that arrives on a non-blocking socket; empty when the other side closes before its end."""
    loop = asyncio.get_running_loop()
    received = b""
    while not received.endswith(b"\n"):
        try:
            chunk = await loop.sock_recv(connection, 1024)
        except ConnectionError:
            return b""
        if not chunk:
            return b""
        received += chunk
    return received


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
