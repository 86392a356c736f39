"""Requests that wait for room, in the order in which they will get it. Knows no pages and no steps."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from runtime.request import Request, sequences_of


@dataclass(slots=True)
class _Entry:
    order: tuple[int, int]
    family: tuple[Request, ...]


_ORDER = attrgetter("order")


class WaitingQueue:
    """Orders requests by (priority, arrival). The order is strict: the head is served next, however large it is, so no
    long request is passed by for ever.

    A request waits as the family of its sequences, which get their room together. Each of them can leave by itself.
    Length and iteration are of sequences.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._orders: dict[int, tuple[int, int]] = {}
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._orders)

    def __contains__(self, uid: int) -> bool:
        return uid in self._orders

    def __iter__(self) -> Iterator[Request]:
        return (sequence for entry in self._entries for sequence in entry.family)

    @property
    def head(self) -> tuple[Request, ...] | None:
        """The sequences of the request that is served next."""
        return self._entries[0].family if self._entries else None

    def push(self, request: Request) -> None:
        family = sequences_of(request)
        assert self._orders.keys().isdisjoint(each.uid for each in family), f"request {request.uid} waits already"
        order = (request.priority, self._num_arrivals)
        self._num_arrivals += 1
        self._orders |= {each.uid: order for each in family}
        insort(self._entries, _Entry(order, family), key=_ORDER)

    def pop(self) -> tuple[Request, ...]:
        """Takes the head out. There must be one."""
        family = self._entries.pop(0).family
        for each in family:
            del self._orders[each.uid]
        return family

    def remove(self, uid: int) -> Request:
        """Takes one sequence out; the others of its request wait on."""
        place = bisect_left(self._entries, self._orders.pop(uid), key=_ORDER)
        entry = self._entries[place]
        (removed,) = (each for each in entry.family if each.uid == uid)
        entry.family = tuple(each for each in entry.family if each.uid != uid)
        if not entry.family:
            del self._entries[place]
        return removed
