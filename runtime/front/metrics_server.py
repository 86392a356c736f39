"""Serves the metrics over HTTP, from threads of its own: a slow scraper delays no step. Knows no metric."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, make_wsgi_app

from configs.schema import ServeSettings
from runtime.front.errors import Unavailable
from runtime.status import Moment
from runtime.telemetry import EngineCollector
from workers.address import join_address

log = logging.getLogger(__name__)

PATH = "/metrics"

TEXT = "text/plain;version=0.0.4"
"""The one format that is spoken, whatever a scraper prefers: in OpenMetrics the library writes names of samples without
their colons (vllm_num_requests_running), and nobody would find them."""

LOOK_TIMEOUT_S = 5.0
"""How long a scrape waits for the engine's loop; one that stands still longer gives the scrape an error."""


def metrics_endpoint(settings: ServeSettings) -> tuple[str, int | None]:
    """Host and port that the metrics listen on; port None where they are not served, 0 for a free one."""
    host, port = settings.metrics.host or settings.server.host, settings.metrics.port
    if port == "auto":
        # The highest port has none after it.
        port = settings.server.port + 1 if 0 < settings.server.port < 65535 else 0
    return host, None if port == "none" else port


SILENCE_S = 10.0
"""How long a connection may say nothing, or take nothing, before it is closed."""

CONNECTION_S = 20.0
"""How long a connection may last, however often it says a little."""

MAX_CONNECTIONS = 16
"""Answered at a time; more wait to be accepted."""


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    """A thread per connection, but no more than MAX_CONNECTIONS of them."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, app: WSGIApplication) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        self._is_closing = threading.Event()
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(app)

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._free.acquire(timeout=0.1):
            if self._is_closing.is_set():
                self.shutdown_request(request)
                return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        limit = threading.Timer(CONNECTION_S, _cut_off, [request])
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection from %s failed", client_address, exc_info=True)

    def serve(self) -> None:
        self.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Ends `serve` and the socket, from another thread."""
        self._is_closing.set()
        self.shutdown()
        self.server_close()


def _cut_off(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)


def _only_metrics(app: WSGIApplication) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == PATH:
            return app({**environ, "HTTP_ACCEPT": TEXT}, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [f"metrics are at {PATH}\n".encode()]

    return answer


class MetricsServer:
    """GET /metrics, in the Prometheus text format.

    look: a moment of the server; called on the event loop in which `start` was, whoever scrapes.
    """

    def __init__(self, settings: ServeSettings, look: Callable[[], Moment]) -> None:
        assert settings.model.served_name is not None, "settings without a served name"
        self._host, self._port = metrics_endpoint(settings)
        self._model_name = settings.model.served_name
        self._look = look
        self._server: _Server | None = None
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

        async def look() -> Moment:
            return self._look()

        def look_from_thread() -> Moment:
            try:
                return asyncio.run_coroutine_threadsafe(look(), loop).result(LOOK_TIMEOUT_S)
            except RuntimeError as error:  # the loop is closed
                raise Unavailable("the server has stopped") from error

        registry = CollectorRegistry()
        registry.register(EngineCollector(self._model_name, look_from_thread))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        try:
            self._server = _Server(self._host, self._port, _only_metrics(make_wsgi_app(registry)))
        except OSError as error:
            raise OSError(
                f"metrics cannot listen on {join_address(self._host, self._port)}: {error.strerror or error}; set "
                "metrics.port to another, or to none"
            ) from None
        self._thread = threading.Thread(target=self._server.serve, name="metrics", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Idempotent. A scrape in progress may still be answered."""
        server, thread = self._server, self._thread
        if server is None or thread is None:
            return
        # A scrape in progress waits for this loop: it must not be waited for on it.
        await asyncio.to_thread(server.close)
        await asyncio.to_thread(thread.join)
        self._server = self._thread = None
