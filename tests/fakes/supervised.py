"""A supervised group for the tests of launchers: begun, handed over, ended; and whether a process is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from configs.schema import WorkerSettings
from runtime.cluster.launcher import LaunchedWorker, Launcher
from runtime.cluster.supervisor import GroupSupervisor, RunningGroup
from workers.terms import LinkTerms


@asynccontextmanager
async def begun(supervisor: GroupSupervisor) -> AsyncIterator[tuple[GroupSupervisor, RunningGroup]]:
    """Starts the ranks; stops the supervisor on leaving, also where the start failed."""
    try:
        yield supervisor, await supervisor.start(lambda *_: None)
    finally:
        await supervisor.stop()


@asynccontextmanager
async def stopped(supervisor: GroupSupervisor) -> AsyncIterator[GroupSupervisor]:
    """For starts that are to fail: whatever comes of them, the supervisor is stopped on leaving."""
    try:
        yield supervisor
    finally:
        await supervisor.stop()


class Proxied:
    """A launcher whose ranks are dialled through relays, which can be cut."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._writers: dict[int, list[asyncio.StreamWriter]] = defaultdict(list)
        self._servers: list[asyncio.Server] = []

    async def launch(self, settings: WorkerSettings, epoch: int, terms: LinkTerms) -> LaunchedWorker:
        launched = await self._launcher.launch(settings, epoch, terms)
        rank = settings.seat.rank
        host, _, port = launched.address.rpartition(":")

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            self._writers[rank] += [writer, far_writer]
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

        server = await asyncio.start_server(relay, host)
        self._servers.append(server)
        launched.address = f"{host}:{server.sockets[0].getsockname()[1]}"
        return launched

    def cut(self, rank: int) -> None:
        for writer in self._writers.pop(rank):
            writer.transport.abort()

    async def close(self) -> None:
        for rank in list(self._writers):
            self.cut(rank)
        for server in self._servers:
            server.close()
        await self._launcher.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
    writer.close()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ranks() -> set[int]:
    """Child processes of ours that are ranks; tests that ran before may have left some in use."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid() and b"workers.main" in (process / "cmdline").read_bytes():
                    found.add(int(process.name))
    return found
