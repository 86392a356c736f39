"""What the server counts while a cell runs: differences of its counters, its newest plan, and memory by its accounts,
of `GetStatus` messages; the drafts of a request, of its usage. Knows no client and no figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from outrider.v1 import operator_pb2, types_pb2


class _Sums:
    """Base of frozen dataclasses of sums: numbers, and tuples of them."""

    __slots__: tuple[str, ...] = ()

    def __sub__(self, earlier: Self) -> Self:
        return self._joined(earlier, lambda one, other: one - other)

    def __add__(self, other: Self) -> Self:
        return self._joined(other, lambda one, another: one + another)

    def _joined(self, other: Self, join: Callable[[float, float], float]) -> Self:
        joined: dict[str, Any] = {}
        for name in type(self).__slots__:
            one, another = getattr(self, name), getattr(other, name)
            joined[name] = (
                # A group that came back with longer drafts counts more positions.
                tuple(join(*pair) for pair in zip_longest(one, another, fillvalue=0))
                if isinstance(one, tuple)
                else join(one, another)
            )
        return type(self)(**joined)


def _read(kind: type[_Sums], message: Message) -> dict[str, Any]:
    """The fields of a message that `kind` has, lists as tuples."""
    values = {name: getattr(message, name) for name in kind.__slots__}
    return {name: value if isinstance(value, int | float) else tuple(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounts(_Sums):
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
        return cls(**_read(cls, message))

    @property
    def overhead_s(self) -> float:
        """What steps took beyond their slowest rank: links, planning, booking."""
        return self.execute_s + self.host_s - self.rank_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCounts(_Sums):
    """What was planned over some stretch of time; fields as in the message `SpeculationStatus`."""

    predicted_steps: int = 0
    predicted_sum_s: float = 0.0
    measured_sum_s: float = 0.0
    error_sum_s: float = 0.0
    zero_budget_steps: int = 0
    explored_steps: int = 0
    steps_by_gamma: tuple[int, ...] = ()
    budget_sum: int = 0
    rollback_tokens: int = 0

    @classmethod
    def of(cls, message: operator_pb2.SpeculationStatus) -> PlanCounts:
        return cls(**_read(cls, message))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts(_Sums):
    """Of requests, by where drafts came from; fields as in the message `Usage`."""

    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    predicted_drafted: int = 0
    predicted_admitted: int = 0
    predicted_accepted: int = 0
    ngram_drafted: int = 0
    ngram_admitted: int = 0
    ngram_accepted: int = 0
    forbidden: int = 0

    @classmethod
    def of(cls, message: types_pb2.Usage) -> DraftCounts:
        return cls(**_read(cls, message))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMoment:
    """The newest step as the server plans it. at_s: since the start of the load. predicted_s: 0 without a profile."""

    at_s: float
    gamma: int
    budget: int
    predicted_s: float
    measured_s: float

    @classmethod
    def of(cls, message: operator_pb2.SpeculationStatus, at_s: float) -> PlanMoment:
        return cls(
            at_s=at_s,
            gamma=message.gamma,
            budget=message.budget,
            predicted_s=message.predicted_s,
            measured_s=message.measured_s,
        )


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
