"""Puts a deployment together: settings, launcher, supervisor, engine, hub, front. Knows no terminal and no torch."""

from __future__ import annotations

import os
import socket

from configs.schema import ServeSettings
from runtime.cluster.supervisor import WorkerSupervisor, launcher_for
from runtime.engine import Engine
from runtime.front.defaults import SamplingDefaults
from runtime.front.hub import StreamHub
from runtime.front.server import FrontServer
from runtime.front.tokenizer import Tokenizer
from runtime.link import Progress
from runtime.statistics import EngineStatistics
from workers.plan import WorkerDescription


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
        return f"{self._settings.server.host}:{self._port}"

    @property
    def description(self) -> WorkerDescription:
        """What the rank said of itself when it was loaded."""
        return self._engine.description

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
    """Raises OSError for an address that cannot be listened on: better before a checkpoint is loaded than after."""
    try:
        with socket.create_server((host, port)):
            return
    except OSError as error:
        raise OSError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; choose another with --host and --port"
        ) from None
