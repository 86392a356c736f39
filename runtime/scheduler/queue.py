"""Requests that wait for room, in the order in which they will get it. Knows no pages and no steps."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from runtime.request import Request


@dataclass(frozen=True, slots=True)
class _Entry:
    order: tuple[int, int]
    request: Request


_ORDER = attrgetter("order")


class WaitingQueue:
    """Orders requests by (priority, arrival). The order is strict: the head is served next, however large it is, so no
    long request is passed by for ever."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._orders: dict[int, tuple[int, int]] = {}
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, uid: int) -> bool:
        return uid in self._orders

    def __iter__(self) -> Iterator[Request]:
        return (entry.request for entry in self._entries)

    @property
    def head(self) -> Request | None:
        return self._entries[0].request if self._entries else None

    def push(self, request: Request) -> None:
        assert request.uid not in self._orders, f"request {request.uid} waits already"
        order = (request.priority, self._num_arrivals)
        self._num_arrivals += 1
        self._orders[request.uid] = order
        insort(self._entries, _Entry(order, request), key=_ORDER)

    def remove(self, uid: int) -> Request:
        order = self._orders.pop(uid)
        return self._entries.pop(bisect_left(self._entries, order, key=_ORDER)).request
