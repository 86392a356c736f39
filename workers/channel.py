"""Every gRPC channel and server of the product is made here, with one set of options. Knows no service.

TLS is added in this file alone: `Security` carries the credentials, and nobody else names an insecure port.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from workers.address import join_address

LOOPBACK = "127.0.0.1"
"""The default of every address on one machine."""

MESSAGE_LIMIT_BYTES = 256 * 1024 * 1024
"""Longest message of the worker link, and longest reply: a plan that admits a full batch of long prompts is a few MiB.
What clients may send the front is bounded by `receive_limit_bytes`."""

KEEPALIVE_S = 10
"""A peer is asked for a sign of life after this long without traffic, in steps or between them ..."""

KEEPALIVE_TIMEOUT_S = 5
"""... and its link is broken when none has come after this long."""

HANDSHAKE_TIMEOUT_S = 10
"""Who connects to a rank and does not come to the point is cut off after this long ..."""

IDLE_TIMEOUT_S = 60
"""... and so is who has no call to make; the runtime always has one."""

Options = Sequence[tuple[str, int]]

_MESSAGE_OPTIONS: Options = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
)

_CHANNEL_OPTIONS: Options = (
    *_MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    # Pings of other purpose hold the keepalive's back, and would wait a minute for their answer.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A proxy named in the environment is meant for the outside world; ranks and front are dialled directly.
    ("grpc.enable_http_proxy", 0),
    # Channels to one address share no connection, so that closing one says nothing about another.
    ("grpc.use_local_subchannel_pool", 1),
)

_SERVER_OPTIONS: Options = (
    *_MESSAGE_OPTIONS,
    # Clients may ask for signs of life as often as the channels above do, also while a stream is idle.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two servers on one port would share its connections by chance; the second must fail instead.
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Credentials of both ends; unset ones mean plain text.

    server_name: what the server's certificate must bear, where that is not the address that is dialled.
    """

    channel: grpc.ChannelCredentials | None = None
    server: grpc.ServerCredentials | None = None
    server_name: str | None = None


PLAIN = Security()


def make_channel(address: str, security: Security = PLAIN) -> grpc.Channel:
    """A blocking channel to host:port. Dials on first use."""
    if security.channel is None:
        return grpc.insecure_channel(address, options=list(_CHANNEL_OPTIONS))
    return grpc.secure_channel(address, security.channel, options=_secure_options(security))


def make_async_channel(address: str, security: Security = PLAIN) -> grpc.aio.Channel:
    """`make_channel` for the running event loop."""
    if security.channel is None:
        return grpc.aio.insecure_channel(address, options=list(_CHANNEL_OPTIONS))
    return grpc.aio.secure_channel(address, security.channel, options=_secure_options(security))


def make_server(num_threads: int, interceptors: Sequence[grpc.ServerInterceptor[Any, Any]] = ()) -> grpc.Server:
    """A server whose handlers run in `num_threads` threads; a stream holds its thread as long as it is open, and no
    connection has more calls than there are threads."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grpc")
    options = [
        *_SERVER_OPTIONS,
        ("grpc.max_concurrent_streams", num_threads),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_S * 1000),
        ("grpc.max_connection_idle_ms", IDLE_TIMEOUT_S * 1000),
    ]
    return grpc.server(pool, interceptors=list(interceptors), options=options, maximum_concurrent_rpcs=None)


def make_async_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    *,
    receive_limit_bytes: int,
    options: Options = (),
) -> grpc.aio.Server:
    """A server whose handlers are coroutines of the running event loop.

    receive_limit_bytes: longest request; gRPC refuses a longer one with RESOURCE_EXHAUSTED before it is read. options:
    come before those that all servers have.
    """
    chosen = {**dict(_SERVER_OPTIONS), "grpc.max_receive_message_length": receive_limit_bytes, **dict(options)}
    return grpc.aio.server(interceptors=list(interceptors), options=list(chosen.items()))


def bind(server: grpc.Server | grpc.aio.Server, host: str, ports: range | int, security: Security = PLAIN) -> int:
    """Binds `server` to the first free port of `ports` on `host` (0 takes any free one); returns the port.

    Raises OSError when none is free.
    """
    candidates = range(ports, ports + 1) if isinstance(ports, int) else ports
    for port in candidates:
        try:
            if security.server is None:
                return server.add_insecure_port(join_address(host, port))
            return server.add_secure_port(join_address(host, port), security.server)
        except RuntimeError:  # gRPC's only word for a port that cannot be had
            continue
    tried = f"port {candidates[0]}" if len(candidates) == 1 else f"ports {candidates[0]} to {candidates[-1]}"
    raise OSError(f"cannot listen on {host}, {tried}: taken, or not an address of this machine")


def _secure_options(security: Security) -> list[tuple[str, int | str]]:
    named = [("grpc.ssl_target_name_override", security.server_name)] if security.server_name is not None else []
    return [*_CHANNEL_OPTIONS, *named]
