"""What every call passes before its service: who calls, whether they may, and that their message comes. Knows no
service.

A call is looked at when its headers are there. Whoever may not make it is told so before a byte of its message is read.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from runtime.access.callers import TOKEN_KEY, Callers, Shown, check_role
from runtime.access.directory import Directory
from runtime.access.identity import ANYONE, CALLER, UNKNOWN, Identity, Role
from runtime.access.roles import role_for
from runtime.audit import audit
from runtime.front.bounds import METADATA_LIMIT_BYTES, OPEN_LIMIT_BYTES
from runtime.front.errors import (
    Forbidden,
    InvalidRequest,
    LateRequest,
    MessageTooLong,
    OutriderError,
    Unauthenticated,
)
from runtime.front.status import Context, answering

MAX_SHOWN_CHARS = 2000
"""Of a refused request, in the audit log."""

Behaviour = Callable[[Any, Context], Awaitable[Any]]


@dataclass(eq=False, slots=True)
class _Running:
    """A call that was let in. revoked: why it may no longer go on."""

    task: asyncio.Task[Any]
    identity: Identity
    role: Role
    method: str
    revoked: OutriderError | None = None


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs alone
    """Of one server. Covers coroutine handlers that take one request, which reaches them as before, and of those that
    take a stream only open ones."""

    def __init__(self, callers: Callers, *, request_timeout_s: float) -> None:
        """request_timeout_s: how long a message may take from its call's headers on."""
        self._callers = callers
        self._timeout_s = request_timeout_s
        self._running: set[_Running] = set()
        callers.add_listener(self._revoke)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        method = str(handler_call_details.method)
        guarded: grpc.RpcMethodHandler[Any, Any] = self._guarded(await continuation(handler_call_details), method)
        return guarded

    def _guarded(self, handler: Any, method: str) -> Any:
        """handler: as the generated code registered it; None for a method that nobody serves."""
        role = role_for(method)
        if handler is None:
            return None
        if handler.request_streaming:
            assert role is None, f"{method} takes a stream, which is for open services alone"
            return self._bounded(handler)
        behaviour, make = handler.unary_unary, grpc.stream_unary_rpc_method_handler
        if handler.response_streaming:
            behaviour, make = handler.unary_stream, grpc.stream_stream_rpc_method_handler
        assert inspect.iscoroutinefunction(behaviour), f"{behaviour} is not a coroutine"

        async def behave(messages: AsyncIterator[bytes], context: Context) -> Any:
            async with answering(context):
                _check_metadata(context)
                identity = None if role is None else self._admit(role, method, context)

            async def read() -> Any:
                async with answering(context):
                    return await self._read(messages, handler.request_deserializer, context)

            if role is None or identity is None:
                return await behaviour(await read(), context)
            return await self._run(behaviour, read, context, (identity, role, method))

        # Taken as a stream, so that we are asked before the message is there.
        return make(behave, response_serializer=handler.response_serializer)

    def _bounded(self, handler: Any) -> Any:
        """An open service that takes a stream: reflection. Each message is short, and comes soon after the last one."""

        async def behave(messages: AsyncIterator[bytes], context: Context) -> None:
            async with answering(context):
                _check_metadata(context)
                asked = self._each(messages, handler.request_deserializer)
                async for reply in handler.stream_stream(asked, context):
                    await context.write(reply)

        return grpc.stream_stream_rpc_method_handler(behave, response_serializer=handler.response_serializer)

    async def _each(self, messages: AsyncIterator[bytes], deserialize: Any) -> AsyncIterator[Any]:
        """Raises LateRequest, MessageTooLong or InvalidRequest."""
        coming = aiter(messages)
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    data = await anext(coming, None)
            except TimeoutError:
                raise LateRequest(f"nothing was asked for {self._timeout_s:g} s; call again when there is") from None
            if data is None:
                return
            if len(data) > OPEN_LIMIT_BYTES:
                raise MessageTooLong(f"a message of {len(data)} bytes; at most {OPEN_LIMIT_BYTES} are taken")
            try:
                yield deserialize(data)
            except DecodeError as error:
                raise InvalidRequest("request", f"not a message of its type: {error}") from None

    def _admit(self, role: Role, method: str, context: Context) -> Identity:
        """Who calls; CALLER from here on. Raises Unauthenticated or Forbidden."""
        if not self._callers.are_known:
            return ANYONE
        CALLER.set(UNKNOWN)
        try:
            identity = self._callers.identify(_shown_by(context))
            CALLER.set(identity)
            check_role(identity, role, method)
        except (Unauthenticated, Forbidden) as error:
            _audit_refusal(method, error.code, str(error), context)
            raise
        return identity

    async def _read(self, messages: AsyncIterator[bytes], deserialize: Any, context: Context) -> Any:
        """The one message, however late. Raises LateRequest or InvalidRequest."""
        try:
            async with asyncio.timeout(self._timeout_s):
                data = await anext(aiter(messages), None)
        except TimeoutError:
            raise LateRequest(f"no whole message within {self._timeout_s:g} s of the call's beginning") from None
        if data is None:
            if context.cancelled():  # also what a message past gRPC's own limit looks like from here
                raise asyncio.CancelledError
            raise InvalidRequest("request", "the call ended without a message; send one")
        return data if deserialize is None else deserialize(data)

    async def _run(
        self,
        behaviour: Behaviour,
        read: Callable[[], Awaitable[Any]],
        context: Context,
        let_in: tuple[Identity, Role, str],
    ) -> Any:
        """From the moment that the caller is let in: who is revoked while the message comes is not served either."""
        task = asyncio.current_task()
        assert task is not None
        identity, role, method = let_in
        call = _Running(task, identity, role, method)
        self._running.add(call)
        request = None
        try:
            request = await read()
            return await behaviour(request, context)
        except asyncio.CancelledError:
            if call.revoked is None:
                raise
            task.uncancel()
            _audit_refusal(method, call.revoked.code, str(call.revoked), context)
            async with answering(context):
                raise call.revoked from None
        except grpc.aio.AbortError:
            if role is Role.OPERATE:
                _audit_refusal(method, _code_of(context), context.details(), context, logging.INFO, **_asked(request))
            raise
        finally:
            self._running.discard(call)

    def _revoke(self, directory: Directory) -> None:
        """Ends running calls of whoever may no longer make them. A new token of the same identity ends none."""
        for call in self._running:
            now = directory.named(call.identity.name)
            try:
                if now is None:
                    raise Unauthenticated(f"{call.identity.name} is no longer known to this server")
                check_role(now, call.role, call.method)
            except (Unauthenticated, Forbidden) as error:
                if call.revoked is None:
                    call.task.cancel()
                call.revoked = error


def _check_metadata(context: Context) -> None:
    """Raises MessageTooLong."""
    size_bytes = sum(len(key) + len(value) for key, value in context.invocation_metadata() or ())
    if size_bytes > METADATA_LIMIT_BYTES:
        raise MessageTooLong(f"{size_bytes} bytes of metadata; at most {METADATA_LIMIT_BYTES} are taken")


def _shown_by(context: Context) -> Shown:
    peer = context.auth_context()
    names = [*peer.get("peer_uri", ()), *peer.get("peer_dns", ())]
    common_name = next(iter(peer.get("x509_common_name", ())), None)
    return Shown(
        authorizations=[value for key, value in context.invocation_metadata() or () if key == TOKEN_KEY],
        names=[_text_of(name) for name in names],
        common_name=_text_of(common_name) if common_name is not None else None,
    )


def _text_of(name: bytes | str) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def _code_of(context: Context) -> str:
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else str(code)


def _asked(request: Any) -> dict[str, str]:
    """What an operator asked for, in part if it is long. Their messages hold no secrets and no prompts."""
    if not isinstance(request, Message):
        return {}
    text = json_format.MessageToJson(request, preserving_proto_field_name=True, indent=None)
    return {"request": text[:MAX_SHOWN_CHARS]}


def _audit_refusal(
    method: str, outcome: str, text: str, context: Context, level: int = logging.WARNING, **details: str
) -> None:
    service, _, name = method[1:].rpartition("/")
    audit(
        name,
        f"was refused {name}: {text}",
        peer=context.peer(),
        outcome=outcome,
        level=level,
        service=service,
        **details,
    )
