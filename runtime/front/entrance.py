"""What guards the ports of the front: certificates, identities, quotas, the audit log, and bounds of connections. Knows
no service and no engine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
from typing import Any

from configs.access import AccessSettings
from configs.schema import ServeSettings
from runtime.access.callers import Callers
from runtime.access.certificates import PortTls, security_of, watched_links
from runtime.access.quota import Quotas
from runtime.access.watched import Watched
from runtime.audit import kept_in
from runtime.front.guard import Guard
from runtime.status import FilesStatus
from workers.channel import Options, Security

log = logging.getLogger(__name__)

PING_INTERVAL_S = 5
"""Clients may ask for signs of life as often as this ..."""

PING_STRIKES = 3
"""... and a connection that does so more often is closed after so many times."""

KEEPALIVE_S = 30
"""A client is asked for a sign of life after this long without traffic ..."""

KEEPALIVE_TIMEOUT_S = 10
"""... and its calls end when none has come after this long."""


class Entrance:
    """Of one server, from `__init__` to `close`."""

    def __init__(self, settings: ServeSettings) -> None:
        """Reads all files. Raises SettingsError that names setting, file and remedy; OSError for an audit log that
        cannot be written."""
        self._settings = settings
        access = settings.access
        server, operator = settings.server.tls, settings.operator.tls
        self._tls = PortTls(server, "server.tls") if server.is_on else None
        self._operator_tls = PortTls(operator, "operator.tls") if operator.is_on else self._tls
        self._links = watched_links(settings.cluster.tls) if settings.cluster.tls.is_on else None
        self.callers = Callers(access.identities)
        self.quotas = Quotas()
        self.callers.add_listener(lambda directory: self.quotas.keep(directory.names))
        self.guard = Guard(self.callers, request_timeout_s=access.request_timeout_s)
        self._open_files = contextlib.ExitStack()
        self._open_files.enter_context(kept_in(access.audit_log))
        self._warn()

    def close(self) -> None:
        """Idempotent."""
        self._open_files.close()

    @property
    def watched(self) -> tuple[Watched[Any], ...]:
        """Everything that is to be read again when it changes: `runtime.reload` looks after it."""
        found: list[Watched[Any]] = [tls.watched for tls in self.certificates]
        if self._links is not None:
            found.append(self._links)
        if self.callers.watched is not None:
            found.append(self.callers.watched)
        return tuple(found)

    def status(self) -> tuple[FilesStatus, ...]:
        """What has become of those files so far."""
        ends = {id(tls.watched): tls.watched.current.ends.timestamp() for tls in self.certificates}
        if self._links is not None:
            ends[id(self._links)] = self._links.current.timestamp()
        return tuple(
            FilesStatus(
                what=one.what,
                changes=one.num_changes,
                refusals=one.num_refusals,
                is_refused=one.problem is not None,
                expires_at=ends.get(id(one)),
            )
            for one in self.watched
        )

    @property
    def certificates(self) -> tuple[PortTls, ...]:
        """One per pair of files."""
        return tuple(dict.fromkeys(tls for tls in (self._tls, self._operator_tls) if tls is not None))

    @property
    def public_security(self) -> Security:
        return security_of(self._tls)

    @property
    def operator_security(self) -> Security:
        """Of operators' own port."""
        return security_of(self._operator_tls)

    @property
    def options(self) -> Options:
        """Bounds of each connection and of their number."""
        return port_options(self._settings.access)

    def _warn(self) -> None:
        """Of what is allowed and unwise."""
        server, operator = self._settings.server, self._settings.operator
        is_public = not _is_loopback(server.host)
        if operator.port == "shared" and is_public and not self.callers.are_known:
            log.warning(
                "operators share server.port on %s and access.identities is unset: whoever reaches it may drain this "
                "server, abort requests and switch policies; set access.identities, or operator.port to a port of its "
                "own",
                server.host,
            )
        ports = ((server.host, self._tls), (operator.host or server.host, self._operator_tls))
        in_plain = [host for host, tls in ports if tls is None and not _is_loopback(host)]
        if self.callers.are_known and in_plain:
            log.warning(
                "access.identities is set and %s is served in plain text: whoever sees the traffic sees the tokens; "
                "set server.tls, or let nobody see it",
                in_plain[0],
            )


def port_options(access: AccessSettings) -> Options:
    """gRPC's own bounds, which it keeps before a call is handed to anybody."""
    return (
        ("grpc.max_concurrent_streams", access.max_streams_per_connection),
        ("grpc.max_allowed_incoming_connections", access.max_connections),
        ("grpc.max_connection_idle_ms", _ms(access.max_connection_idle_s)),
        ("grpc.server_handshake_timeout_ms", _ms(access.request_timeout_s)),
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_S * 1000),
        ("grpc.http2.max_ping_strikes", PING_STRIKES),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    )


def _ms(seconds: float) -> int:
    return min(int(seconds * 1000), 2**31 - 1)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
