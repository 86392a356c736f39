"""What the server counts of itself while a cell runs: differences of its counters, and memory by its accounts. Reads
`GetStatus` messages; knows no client and no figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounts:
    """Sums over some stretch of time; fields as in the message `Counters`. Tokens and passes are those of every request
    that the server had, whoever sent it."""

    steps: int = 0
    emitted: int = 0
    drafted_by_position: tuple[int, ...] = ()
    admitted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    rank_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    draft_s: float = 0.0
    execute_s: float = 0.0
    host_s: float = 0.0

    @classmethod
    def of(cls, message: operator_pb2.Counters) -> ServerCounts:
        values: dict[str, Any] = {field.name: getattr(message, field.name) for field in fields(cls)}
        by_position = {name: tuple(value) for name, value in values.items() if name.endswith("_by_position")}
        return cls(**{**values, **by_position})

    def __sub__(self, earlier: ServerCounts) -> ServerCounts:
        return self._joined(earlier, lambda one, other: one - other)

    def __add__(self, other: ServerCounts) -> ServerCounts:
        return self._joined(other, lambda one, another: one + another)

    def _joined(self, other: ServerCounts, join: Callable[[float, float], float]) -> ServerCounts:
        joined: dict[str, Any] = {}
        for field in fields(self):
            one, another = getattr(self, field.name), getattr(other, field.name)
            joined[field.name] = (
                # A group that came back with longer drafts counts more positions.
                tuple(join(*pair) for pair in zip_longest(one, another, fillvalue=0))
                if isinstance(one, tuple)
                else join(one, another)
            )
        return ServerCounts(**joined)

    @property
    def overhead_s(self) -> float:
        """What steps took beyond their slowest rank: links, planning, booking."""
        return self.execute_s + self.host_s - self.rank_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes in use by the allocator's accounts, over all ranks: parameters, the records of a step, slots and pages of
    live sequences."""

    parameters: int
    records: int
    slots: int
    pages: int

    @classmethod
    def of(cls, status: operator_pb2.GetStatusResponse) -> MemoryUse:
        return cls(
            parameters=sum(rank.parameter_bytes for rank in status.ranks),
            records=sum(batch.record_bytes for batch in status.batches),
            slots=sum(batch.slots_used * batch.slot_bytes for batch in status.batches),
            pages=sum(pool.pages_used * pool.page_bytes for batch in status.batches for pool in batch.pools),
        )

    @property
    def total(self) -> int:
        return self.parameters + self.records + self.slots + self.pages


def peak(samples: Sequence[MemoryUse]) -> MemoryUse:
    """The sample of the largest total. At least one is needed."""
    return max(samples, key=lambda use: use.total)
