"""The services of one port, which may come after it listens: calls before that are refused as not ready, instead of as
unknown. Knows no service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio

from runtime.front.errors import Unavailable
from runtime.front.status import Context, answering

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Doors(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in its stubs alone
    """What generated code is given in a server's place, to add a service to.

    services: full names of those that are still to come.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self.services = tuple(services)
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._added: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._are_open = False

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler[Any, Any]]) -> None:
        self._added += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """The generated code tells the same handlers twice, for servers of another kind."""

    def open(self) -> None:
        """All services have been added."""
        self._are_open = True

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        if self._are_open:
            found = (handler.service(handler_call_details) for handler in self._added)
            return next((handler for handler in found if handler is not None), None)
        if handler_call_details.method.startswith(self._prefixes):
            # On the wire an error looks the same whatever the method streams.
            return grpc.unary_unary_rpc_method_handler(_refuse)
        return None


async def _refuse(request: bytes, context: Context) -> bytes:
    async with answering(context):
        raise Unavailable("the server is starting; try again later")
    raise AssertionError("aborting raises")
