"""Requests that are not protobuf of their type, or longer than may be: refused, for every service. Knows no service.

Left to itself, gRPC answers the former with UNKNOWN and logs a traceback for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from runtime.front.bounds import REQUEST_LIMIT_BYTES
from runtime.front.errors import InvalidRequest, MessageTooLong, OutriderError
from runtime.front.status import Context, answering

Behaviour = Callable[[Any, Context], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request that could not be read."""

    error: OutriderError


class RefuseMalformed(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs alone
    """Covers coroutine handlers that take one request; those of reflection take a stream."""

    def __init__(self) -> None:
        self._max_bytes = REQUEST_LIMIT_BYTES

    def bound(self, max_bytes: int) -> None:
        """Refuses longer messages with RESOURCE_EXHAUSTED from now on, before they are read."""
        self._max_bytes = max_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        guarded: grpc.RpcMethodHandler[Any, Any] = self._guarded(await continuation(handler_call_details))
        return guarded

    def _guarded(self, handler: Any) -> Any:
        """The handler of one method, as the generated code registered it; None for a method that nobody serves."""
        if handler is None or handler.request_streaming:
            return handler
        behaviour, make = handler.unary_unary, grpc.unary_unary_rpc_method_handler
        if handler.response_streaming:
            behaviour, make = handler.unary_stream, grpc.unary_stream_rpc_method_handler
        assert inspect.iscoroutinefunction(behaviour), f"{behaviour} is not a coroutine"
        return make(
            _refusing(behaviour),
            request_deserializer=self._reading(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _reading(self, deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
        def read(data: bytes) -> Any:
            if len(data) > self._max_bytes:
                return _Malformed(
                    MessageTooLong(f"a message of {len(data)} bytes; at most {self._max_bytes} are taken")
                )
            try:
                return deserialize(data) if deserialize is not None else data
            except DecodeError as error:
                return _Malformed(InvalidRequest("request", f"not a message of its type: {error}"))

        return read


def _refusing(behaviour: Behaviour) -> Behaviour:
    async def behave(request: Any, context: Context) -> Any:
        if isinstance(request, _Malformed):
            async with answering(context):
                raise request.error
        return await behaviour(request, context)

    return behave
