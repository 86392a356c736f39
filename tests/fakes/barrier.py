"""Where ranks without torch meet: rank 0 takes a byte from each and gives one back. It breaks and blocks as
collectives do: who waits for a rank that is gone gets an error, or waits until its patience ends."""

from __future__ import annotations

import socket

from configs.schema import WorkerSettings
from workers.plan import CollectiveFailed


class NoBarrier:
    """Of a rank that waits for nobody."""

    def join(self) -> None:
        pass


class Barrier:
    """Made by every rank while it loads; returns when all are there."""

    def __init__(self, settings: WorkerSettings) -> None:
        seat, size = settings.seat, settings.parallel.dp * settings.parallel.tp
        self._is_first = seat.rank == 0
        self._connections: list[socket.socket] = []
        if size == 1:
            return
        assert seat.store_address is not None
        if self._is_first:
            assert seat.store_fd is not None
            self._listener = socket.socket(fileno=seat.store_fd)  # kept for life, as a store keeps it
            self._connections = [self._listener.accept()[0] for _ in range(size - 1)]
        else:
            assert seat.store_fd is None
            host, _, port = seat.store_address.rpartition(":")
            self._connections = [socket.create_connection((host, int(port)), source_address=(seat.bind_host, 0))]
        self.join()
        for connection in self._connections:
            connection.settimeout(settings.collective_timeout_s)

    def join(self) -> None:
        """Raises CollectiveFailed."""
        for act in (self._receive, self._send) if self._is_first else (self._send, self._receive):
            for connection in self._connections:
                try:
                    act(connection)
                except OSError as error:
                    raise CollectiveFailed(f"the barrier broke: {error!r}") from error

    def _send(self, connection: socket.socket) -> None:
        connection.sendall(b".")

    def _receive(self, connection: socket.socket) -> None:
        if not connection.recv(1):
            raise ConnectionError("the peer is gone")
