"""Serves the metrics over HTTP, from a thread of its own: a slow scraper delays no step. Knows no metric."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server

from configs.schema import ServeSettings
from runtime.front.errors import Unavailable
from runtime.status import EngineStatus
from runtime.telemetry import EngineCollector
from workers.address import join_address

LOOK_TIMEOUT_S = 5.0
"""How long a scrape waits for the engine's loop; one that stands still longer gives the scrape an error."""


def metrics_endpoint(settings: ServeSettings) -> tuple[str, int | None]:
    """Host and port that the metrics listen on; port None where they are not served, 0 for a free one."""
    host, port = settings.metrics.host or settings.server.host, settings.metrics.port
    if port == "auto":
        # The highest port has none after it.
        port = settings.server.port + 1 if 0 < settings.server.port < 65535 else 0
    return host, None if port == "none" else port


class MetricsServer:
    """GET /metrics, in the Prometheus text format.

    look: a moment of the engine; called on the event loop in which `start` was, whoever scrapes.
    """

    def __init__(self, settings: ServeSettings, look: Callable[[], EngineStatus]) -> None:
        assert settings.model.served_name is not None, "settings without a served name"
        self._host, self._port = metrics_endpoint(settings)
        self._model_name = settings.model.served_name
        self._look = look
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str | None:
        """host:port where the metrics are; None while they are not served."""
        return join_address(self._host, self._server.server_port) if self._server is not None else None

    def start(self) -> None:
        """Listens, unless `metrics.port` is none. Raises OSError that names the setting when it cannot."""
        if self._port is None:
            return
        loop = asyncio.get_running_loop()

        async def look() -> EngineStatus:
            return self._look()

        def look_from_thread() -> EngineStatus:
            try:
                return asyncio.run_coroutine_threadsafe(look(), loop).result(LOOK_TIMEOUT_S)
            except RuntimeError as error:  # the loop is closed
                raise Unavailable("the server has stopped") from error

        registry = CollectorRegistry()
        registry.register(EngineCollector(self._model_name, look_from_thread))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(self._port, self._host, registry)
        except OSError as error:
            raise OSError(
                f"metrics cannot listen on {join_address(self._host, self._port)}: {error.strerror or error}; set "
                "metrics.port to another, or to none"
            ) from None

    async def stop(self) -> None:
        """Idempotent. Returns when the thread has ended; a scrape in progress may still be answered."""
        server, thread, self._server, self._thread = self._server, self._thread, None, None
        if server is None or thread is None:
            return
        # The scrape in progress waits for this loop: it must not be waited for on it.
        await asyncio.to_thread(server.shutdown)
        await asyncio.to_thread(thread.join)
        server.server_close()
