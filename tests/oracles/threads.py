"""Ranks as threads that stay in their groups from one piece of work to the next. Test material only."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed

from parallel.collectives import CollectiveError
from parallel.mesh import Mesh
from parallel.rendezvous import RankGroups, alone, join_groups

T = TypeVar("T")
c10d: Any = torch.distributed


class Ranks:
    """The ranks of `mesh`, joined. Property tests run many examples over one set of groups."""

    def __init__(self, mesh: Mesh, *, timeout_s: float = 10.0) -> None:
        self.mesh = mesh
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(mesh.size)
        self.groups = self._join()

    def __call__(self, work: Callable[[RankGroups], T]) -> list[T]:
        """`work(groups)` on every rank at once; results in rank order. Raises what went wrong first of all, rather than
        what it did to the others; the ranks have new groups then."""
        futures = [self._pool.submit(work, groups) for groups in self.groups]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            self.groups = self._join()
            raise min(errors, key=lambda error: isinstance(error, CollectiveError))
        return [future.result() for future in futures]

    def close(self) -> None:
        self._pool.shutdown()

    def _join(self) -> list[RankGroups]:
        if self.mesh.size == 1:
            return [alone()]
        store = c10d.HashStore()
        store.set_timeout(timedelta(seconds=self._timeout_s))
        futures = [
            self._pool.submit(join_in_thread, self.mesh, rank, store, self._timeout_s) for rank in range(self.mesh.size)
        ]
        return [future.result() for future in futures]


def join_in_thread(mesh: Mesh, rank: int, store: Any, timeout_s: float) -> RankGroups:
    return join_groups(mesh, rank, store, carrier="gloo", bind_host="127.0.0.1", timeout_s=timeout_s)
