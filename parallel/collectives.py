"""Collectives of one group of ranks, counted and timed. Knows no mesh, no layer and no plan.

Every collective of the product goes through `Group`, so that each rank can tell which ones it joined, in what order
and for how long it waited. A group of one does nothing and counts nothing.

The process groups are torch's own backend objects, not the global ones of torch.distributed: a rank's groups live as
long as the rank, and several sets may live in one process, as the tests have them.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor


class CollectiveError(RuntimeError):
    """A collective broke or timed out. After it the group is of no use."""


@dataclass(slots=True)
class Tally:
    """Of one group since the last `clear`: collectives joined, and a digest of their kinds in order."""

    count: int = 0
    digest: int = 0

    def add(self, kind: str) -> None:
        self.count += 1
        self.digest = zlib.crc32(kind.encode(), self.digest)


@dataclass(slots=True)
class CollectiveLog:
    """Of all groups of a rank since the last `clear`. waited_s: time in collectives, launch only on GPUs."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    waited_s: float = 0.0

    def clear(self) -> None:
        self.waited_s = 0.0
        for tally in self.tallies.values():
            tally.count = tally.digest = 0


class Group:
    """`rank` of `size` ranks that join the same collectives in the same order; rank 0 leads.

    backend: a torch ProcessGroup backend (ProcessGroupGloo, ProcessGroupNCCL); None in a group of one.
    Tensors must be contiguous. All methods raise CollectiveError.
    """

    def __init__(self, name: str, rank: int, size: int, backend: Any, log: CollectiveLog) -> None:
        assert (backend is None) == (size == 1)
        self.name, self.rank, self.size = name, rank, size
        self._backend = backend
        self._log = log
        self._tally = Tally()
        if size > 1:
            log.tallies[name] = self._tally

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place; bitwise the same on all of them. Empty tensors are left alone."""
        if self.size > 1 and x.numel():
            self._run("all_reduce", lambda: self._backend.allreduce([x]))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *shape]: every rank's `x`, in rank order; all of one shape."""
        if self.size == 1:
            return x[None]
        out = x.new_empty((self.size, *x.shape))
        if x.numel():
            self._run("all_gather", lambda: self._backend._allgather_base(out.view(-1), x.view(-1)))
        return out

    def gather(self, x: Tensor) -> Tensor | None:
        """As `all_gather`, on the leader; None elsewhere."""
        if self.size == 1:
            return x[None]
        out = x.new_empty((self.size, *x.shape)) if self.leads else None
        if x.numel():
            options = dist.GatherOptions()
            options.rootRank = 0
            self._run("gather", lambda: self._backend.gather([] if out is None else [list(out)], [x], options))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        """The leader's `x`, in place; all of one shape and dtype."""
        if self.size > 1 and x.numel():
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.rootTensor = 0
            self._run("broadcast", lambda: self._backend.broadcast([x], options))
        return x

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Rows of `x`, `send_counts[r]` of them for rank r, in rank order; returns the rows that came, likewise."""
        if self.size == 1:
            return x
        out = x.new_empty((sum(receive_counts), *x.shape[1:]))
        # Not even empty exchanges are left out: who has nothing to send may have something to take.
        self._run(
            "all_to_all",
            lambda: self._backend.alltoall_base(
                out, x, list(receive_counts), list(send_counts), dist.AllToAllOptions()
            ),
        )
        return out

    def _run(self, kind: str, launch: Callable[[], Any]) -> None:
        began = time.perf_counter()
        self._tally.add(kind)
        try:
            launch().wait()
        except RuntimeError as error:
            text = str(error).strip().partition("\n")[0]
            raise CollectiveError(f"{kind} number {self._tally.count} of group {self.name}: {text}") from error
        self._log.waited_s += time.perf_counter() - began


def solo(name: str = "solo") -> Group:
    """The group of a rank alone."""
    return Group(name, 0, 1, None, CollectiveLog())


def exchange_counts(group: Group, counts_R: Tensor) -> list[int]:
    """How many rows each rank has for us, given how many we have for each; int64 [size]."""
    ones = [1] * group.size
    return [int(count) for count in group.all_to_all(counts_R, ones, ones).tolist()]
