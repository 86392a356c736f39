"""A rank's process opens to the world: its service, and for rank 0 the seat of the group's store. Knows no model.

There is no torch yet. The seat is a socket that listens; the store takes it over by its number when the rank loads.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import grpc

from workers.address import join_address
from workers.server import LoadWorker, serve_worker
from workers.terms import LinkTerms

BACKLOG = 1024
"""Ranks that may knock at the store at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSeat:
    """Where a group's store is to be: host:port, and the number of the listening socket in rank 0's process."""

    address: str
    fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRank:
    """What the runtime must know of a rank's process before it can load.

    address: host:port of its service. host: an address of its machine, for its end of collectives.
    store: of rank 0 in a group of several.
    """

    address: str
    host: str
    store: StoreSeat | None


def open_rank(
    load: LoadWorker,
    *,
    epoch: int,
    terms: LinkTerms,
    bind_host: str,
    advertise_host: str | None,
    own_host: str,
    ports: tuple[int, int],
    keeps_store: bool,
) -> tuple[grpc.Server, OpenedRank]:
    """Serves on the first free one of `ports` (first and last; 0 takes any), and listens for the store on the next.

    own_host: the machine's address to tell where it listens on all of them and none is to be advertised.

    Raises OSError, with the setting to change, when none is free, CertificateProblem where the terms name files that
    cannot be used.
    """
    candidates = range(ports[0], ports[1] + 1)
    told = advertise_host or (own_host if _means_all(bind_host) else bind_host)
    security = terms.security(told)
    try:
        server, address = serve_worker(
            load,
            epoch=epoch,
            secret=terms.secret,
            bind_host=bind_host,
            advertise_host=told,
            ports=candidates,
            security=security,
        )
        store = _seat(bind_host, told, candidates) if keeps_store else None
    except OSError as error:
        remedy = "set cluster.worker_bind_host to an address of the rank's machine"
        if ports[0]:
            remedy += (
                ", or widen cluster.worker_port_min to worker_port_max: every rank takes a port, rank 0 of several two"
            )
        raise OSError(f"{error}; {remedy}") from None
    return server, OpenedRank(address=address, host=told if _means_all(bind_host) else bind_host, store=store)


def _seat(host: str, told: str, ports: range) -> StoreSeat:
    for port in ports:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError:
            continue
        bound = listener.getsockname()[1]
        return StoreSeat(address=join_address(told, bound), fd=listener.detach())
    raise OSError(f"cannot listen on {host} for the group's store, ports {ports[0]} to {ports[-1]}: taken")


def _means_all(host: str) -> bool:
    """Whether a host stands for every address of its machine: good to listen on, and nothing to tell a peer."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
