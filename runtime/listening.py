"""Which addresses a deployment listens on, and whether it can, found out before there is anything to serve there."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from configs.schema import ServeSettings
from runtime.front.metrics_server import metrics_endpoint
from workers.address import join_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A port of the front. whom: it is for. host_key, port_key: the settings to change."""

    whom: str
    host: str
    port: int
    host_key: str
    port_key: str

    def check_free(self) -> None:
        """As `check_free`."""
        what = "" if self.whom == "clients" else f" for {self.whom}"
        check_free(what, self.host, self.port, self.host_key, self.port_key)


def doors_of(settings: ServeSettings) -> Iterator[Door]:
    """All ports of the front, that of clients first."""
    server, operator = settings.server, settings.operator
    yield Door(whom="clients", host=server.host, port=server.port, host_key="server.host", port_key="server.port")
    if operator.port != "shared":
        host = operator.host or server.host
        yield Door(whom="operators", host=host, port=operator.port, host_key="operator.host", port_key="operator.port")
    if server.health_port != "none":
        yield Door(
            whom="health",
            host=server.host,
            port=server.health_port,
            host_key="server.host",
            port_key="server.health_port",
        )
    host, port = metrics_endpoint(settings)
    if port is not None:
        yield Door(whom="metrics", host=host, port=port, host_key="metrics.host", port_key="metrics.port (or none)")


def check_free(what: str, host: str, port: int, host_key: str, port_key: str) -> None:
    """Raises OSError, which names the settings, for an address that cannot be listened on: better before a checkpoint
    is loaded than after.

    A name may stand for several addresses. The front listens on those that this machine has; none may be taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise OSError(f"cannot listen on {host!r}{what}: {why}; give {host_key} an address of this machine") from None
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
        raise OSError(
            f"cannot listen on {join_address(host, port)}{what}: {why}; choose another with {host_key} and {port_key}"
        )
