"""A wire between the runtime and each rank that tests can cut or clog. Knows no gRPC."""

from __future__ import annotations

import asyncio
import contextlib

from configs.schema import WorkerSettings
from runtime.cluster.launcher import LaunchedWorker, Launcher
from workers.terms import LinkTerms


class Relay:
    """Passes bytes between whoever dials `address` and a target."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    def cut(self) -> None:
        """Connections are reset, and new ones refused."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    def clog(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._flowing.clear()

    async def close(self) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, there_writer]
        for pair in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pump(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


class RelayedLauncher:
    """A `Launcher` whose ranks are dialled through relays. relays: of the present life, by rank."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.relays: dict[int, Relay] = {}

    async def launch(self, settings: WorkerSettings, epoch: int, terms: LinkTerms) -> LaunchedWorker:
        launched = await self._launcher.launch(settings, epoch, terms)
        await self._drop(settings.seat.rank)
        relay = self.relays[settings.seat.rank] = Relay(launched.address)
        await relay.open()
        launched.address = relay.address
        return launched

    async def close(self) -> None:
        for rank in list(self.relays):
            await self._drop(rank)
        await self._launcher.close()

    async def _drop(self, rank: int) -> None:
        if rank in self.relays:
            await self.relays.pop(rank).close()
