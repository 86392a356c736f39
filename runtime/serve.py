"""Puts a deployment together: settings, launcher, supervisor, engine, hub, front. Knows no terminal and no torch."""

from __future__ import annotations

import errno
import os
import socket

from configs.schema import ServeSettings
from runtime.cluster.supervisor import WorkerSupervisor, launcher_for
from runtime.engine import Engine
from runtime.front.defaults import SamplingDefaults
from runtime.front.hub import StreamHub
from runtime.front.server import FrontServer
from runtime.front.tokenizer import Tokenizer
from runtime.statistics import EngineStatistics
from workers.address import join_address
from workers.plan import Progress, WorkerDescription


class Deployment:
    """One model on one rank behind one gRPC front; all but the rank lives in this process."""

    def __init__(self, settings: ServeSettings) -> None:
        """settings: as `load_settings` gives them, with the checkpoint's path set.

        Raises LoadError for what the front reads of the checkpoint: tokenizer, chat template, sampling defaults.
        """
        assert settings.model.path is not None, "settings without a checkpoint"
        self._settings = settings
        self._tokenizer = Tokenizer.load(settings.model.path)
        self._defaults = SamplingDefaults.load(settings.model.path)
        self._supervisor = WorkerSupervisor(settings, launcher_for(settings))
        self._hub = StreamHub(settings.server)
        self._engine = Engine(settings, self._supervisor, self._hub)
        self._front: FrontServer | None = None
        self._port: int | None = None

    async def start(self, progress: Progress) -> None:
        """Returns when requests are served. `stop` must follow, also where this raises or is cancelled.

        Raises OSError (the address cannot be listened on) or WorkerError (the rank cannot be started or loaded).
        """
        _check_free(self._settings.server.host, self._settings.server.port)
        await self._engine.start(progress)
        self._front = FrontServer(self._engine, self._hub, self._tokenizer, self._settings, defaults=self._defaults)
        self._port = await self._front.start()

    async def stop(self, drain_s: float) -> None:
        """Refuses new requests, gives running ones `drain_s` seconds, ends front and rank.

        Idempotent; may be cancelled, and called again with less patience.
        """
        if self._front is not None:
            await self._front.stop(drain_s)
        await self._engine.stop(0)

    @property
    def address(self) -> str:
        """host:port where clients reach us; known once `start` has returned."""
        assert self._port is not None, "not started"
        return join_address(self._settings.server.host, self._port)

    @property
    def description(self) -> WorkerDescription:
        """What the rank said of itself when it was loaded."""
        return self._engine.description

    @property
    def engine(self) -> Engine:
        """The part that schedules. What clients may ask of it, they ask over gRPC; this is for tests and tools."""
        return self._engine

    @property
    def supervisor(self) -> WorkerSupervisor:
        """The part that keeps the rank alive; for tests and tools, which may end the rank behind its back."""
        return self._supervisor

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the front uses, for tests and tools."""
        return self._tokenizer

    def statistics(self) -> EngineStatistics:
        """A moment of the engine."""
        return self._engine.statistics()

    def check_integrity(self) -> list[str]:
        """Violated invariants of the host's books; empty when all hold."""
        return self._engine.check_integrity()

    def facts(self) -> list[tuple[str, str]]:
        """What was started and where, as rows to print."""
        launched = self._supervisor.launched
        rows = [("front", self.address)]
        if launched is not None:
            rows.append(("worker", f"{launched.address} ({launched.name})"))
        if self._settings.cluster.launcher == "ray":
            import ray

            whose = "joined" if self._settings.cluster.ray_address else "started here"
            rows.append(("ray", f"{ray.get_runtime_context().gcs_address} ({whose})"))
        return rows


def _check_free(host: str, port: int) -> None:
    """Raises OSError for an address that cannot be listened on: better before a checkpoint is loaded than after.

    A name may stand for several addresses. The front listens on those that this machine has; none may be taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise OSError(f"cannot listen on {host!r}: {why}; give --host an address of this machine") from None
    errors: list[OSError] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
        except OSError as error:
            errors.append(error)
    taken = [error for error in errors if error.errno == errno.EADDRINUSE]
    if taken or len(errors) == len(found):
        why = os.strerror((taken or errors)[0].errno or 0)
        raise OSError(f"cannot listen on {join_address(host, port)}: {why}; choose another with --host and --port")
