"""How often calls ended with an error, by its name in the error tree. Knows no service, no metric and no status.

Each RPC runs in a task of its own, in which the server has said where its errors are counted; what answers the error
asks there, so nobody in between passes a counter on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from runtime.front import errors
from runtime.front.errors import InternalError, OutriderError


class Refusals:
    """The counts of one server."""

    def __init__(self) -> None:
        self._counts = {kind.__name__: 0 for kind in _kinds_below(OutriderError)}

    def note(self, error: Exception) -> None:
        """Counts an error as the nearest kind that the tree has; one that has no place in it is our bug."""
        names = (kind.__name__ for kind in type(error).__mro__)
        self._counts[next((name for name in names if name in self._counts), InternalError.__name__)] += 1

    def view(self) -> Mapping[str, int]:
        """By name, those that never happened with 0."""
        return dict(self._counts)


_COUNTED_BY: ContextVar[Refusals | None] = ContextVar("refusals", default=None)


def note(error: Exception) -> None:
    """Counts the error that ends the RPC of the running task. Does nothing in a task that is no server's."""
    refusals = _COUNTED_BY.get()
    if refusals is not None:
        refusals.note(error)


class CountRefusals(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs alone
    """Has the errors of every RPC counted. To be the outermost: what other interceptors refuse counts too."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        _COUNTED_BY.set(self._refusals)
        return await continuation(handler_call_details)


def _kinds_below(kind: type[OutriderError]) -> Iterator[type[OutriderError]]:
    """Those that the tree draws."""
    for one in kind.__subclasses__():
        if one.__module__ == errors.__name__:
            yield one
            yield from _kinds_below(one)
