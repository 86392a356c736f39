"""Whether what the settings name can be listened on. Nothing stays open."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from runtime.doctor.finding import Finding, failure, ok, split_remedy, warning
from runtime.doctor.inquiry import Inquiry
from runtime.listening import doors_of
from workers.address import join_address
from workers.channel import LOOPBACK


def check_ports(inquiry: Inquiry) -> Iterator[Finding]:
    """Of clients, operators, health and metrics."""
    for door in doors_of(inquiry.settings):
        try:
            door.check_free()
        except OSError as error:
            yield split_remedy(str(error))
        else:
            yield ok(
                f"{door.whom}: {join_address(door.host, door.port) if door.port else f'a free port of {door.host}'}"
            )


def check_worker_ports(inquiry: Inquiry) -> Iterator[Finding]:
    """Those that ranks of this machine may take: one each, and one where they meet."""
    cluster, num_ranks = inquiry.settings.cluster, inquiry.mesh.size
    host = cluster.worker_bind_host or LOOPBACK
    if not cluster.worker_port_min:
        if cluster.ray_address or _is_free(host, 0):
            yield ok("ranks take free ports")
        else:
            yield failure(
                f"ranks cannot listen on {host}, which is no address of this machine",
                "set cluster.worker_bind_host to one that is, or leave it unset",
            )
        return
    ports = range(cluster.worker_port_min, cluster.worker_port_max + 1)
    ours = {door.port for door in doors_of(inquiry.settings)}  # are taken first
    num_free = sum(port not in ours and _is_free(host, port) for port in ports)
    num_wanted = num_ranks + (num_ranks > 1)
    text = f"{num_free} of ports {ports[0]} to {ports[-1]} are free on {host}, for {num_wanted} listeners of ranks"
    widen = "widen cluster.worker_port_min to worker_port_max, or set both to 0"
    if num_free >= num_wanted:
        yield ok(text)
    elif cluster.ray_address:  # ranks may be on several machines, of which this is perhaps none
        yield warning(text, f"{widen}, unless ranks are spread over nodes that have them free")
    else:
        yield failure(text, widen)


def _is_free(host: str, port: int) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError:
        return False
    return True
