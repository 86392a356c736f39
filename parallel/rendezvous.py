"""How the ranks of one life find each other: a store kept by rank 0, and the process groups made over it.

A store and its groups are made once per life, and end with the processes: nothing of a lost group is ever reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed

from parallel.collectives import CollectiveError, CollectiveLog, Group
from parallel.mesh import Mesh

c10d: Any = torch.distributed
"""Stores and backends are public there, but its stubs do not say so."""

Store = Any
"""A torch.distributed.Store."""

Carrier = Literal["gloo", "nccl"]

JOIN_TIMEOUT_S = 3600.0
"""How long a rank waits for the others at start. Whoever started them loses patience long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """A rank and the groups it belongs to.

    tp: the ranks that share its sequences. world: all ranks, where they own whole experts; else a group of one.
    """

    mesh: Mesh
    rank: int
    tp: Group
    world: Group
    log: CollectiveLog

    @property
    def dp_rank(self) -> int:
        return self.mesh.dp_rank(self.rank)


def alone() -> RankGroups:
    """The groups of a rank that has no peers."""
    log = CollectiveLog()
    return RankGroups(
        mesh=Mesh(), rank=0, tp=Group("tp.0", 0, 1, None, log), world=Group("world", 0, 1, None, log), log=log
    )


def open_store(address: str, *, listen_fd: int | None) -> Store:
    """The store of a life at host:port: kept here where `listen_fd` is a socket that listens there, else joined.

    Raises CollectiveError when it is not reached.
    """
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        if listen_fd is not None:
            return c10d.TCPStore(
                host.strip("[]"), int(port), None, True, timeout, wait_for_workers=False, master_listen_fd=listen_fd
            )
        return c10d.TCPStore(host.strip("[]"), int(port), None, False, timeout)
    except RuntimeError as error:
        raise CollectiveError(f"the store of the group at {address} is not reached: {error}") from error


def wait_for_all(store: Store, mesh: Mesh, rank: int) -> None:
    """Returns when every rank has called it. Ranks read their weights before, and some are slower than a collective may
    be. Raises CollectiveError."""
    try:
        store.set(f"ready.{rank}", "")
        store.wait([f"ready.{peer}" for peer in range(mesh.size)], timedelta(seconds=JOIN_TIMEOUT_S))
    except RuntimeError as error:
        raise CollectiveError(f"rank {rank} waited in vain for the others: {error}") from error


def join_groups(
    mesh: Mesh,
    rank: int,
    store: Store,
    *,
    carrier: Carrier,
    bind_host: str,
    timeout_s: float,
) -> RankGroups:
    """Meets the other ranks; returns when all are there. Every rank calls it with the same mesh.

    bind_host: the address of this machine that gloo listens on and tells its peers. timeout_s: of every collective.
    Raises CollectiveError.
    """
    log = CollectiveLog()

    def group(name: str, ranks: Sequence[int]) -> Group:
        place, size = ranks.index(rank), len(ranks)
        if size == 1:
            return Group(name, 0, 1, None, log)
        prefix = c10d.PrefixStore(name, store)
        make = _nccl if carrier == "nccl" else _gloo
        try:
            backend = make(prefix, place, size, bind_host, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            text = str(error).strip().partition("\n")[0]
            raise CollectiveError(f"group {name} of ranks {list(ranks)} did not come together: {text}") from error
        return Group(name, place, size, backend, log)

    tp = group(f"tp.{mesh.dp_rank(rank)}", mesh.tp_ranks(rank))
    world = group("world", range(mesh.size) if mesh.spreads_experts else [rank])
    return RankGroups(mesh=mesh, rank=rank, tp=tp, world=world, log=log)


def _gloo(store: Store, rank: int, size: int, bind_host: str, timeout: timedelta) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=bind_host)]
    options._threads = 2
    options._timeout = timeout
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, bind_host: str, timeout: timedelta) -> Any:
    # NCCL takes its network interfaces from its own environment (NCCL_SOCKET_IFNAME).
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return c10d.ProcessGroupNCCL(store, rank, size, options)
