"""From the error tree to gRPC statuses, at the edge of every RPC. Knows no service.

A wrong field is told twice: in the status's text, and as a google.rpc.BadRequest for programs, which travels in the
trailer `grpc-status-details-bin` (https://google.aip.dev/193). So is the time after which another try may succeed, as a
google.rpc.RetryInfo, and in `grpc-retry-pushback-ms` for gRPC's own retries.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from runtime.front.errors import InternalError, InvalidRequest, OutriderError, OverQuota
from runtime.front.refusals import note

log = logging.getLogger(__name__)

MAX_DETAILS_CHARS = 600
MAX_DETAILS_BYTES = 1200
"""The text of an error travels in a header, where a byte may take three, and with a BadRequest twice more in another,
where it takes four thirds. Peers take 8 KiB of headers in all."""

PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""Trailing metadata that tells a client's retries how long to wait (gRFC A6)."""

Context = grpc.aio.ServicerContext[Any, Any]
Trailers = Sequence[tuple[str, str | bytes]]


@asynccontextmanager
async def answering(context: Context, trailers: Callable[[], Trailers] = tuple) -> AsyncIterator[None]:
    """Ends the RPC with the status of whatever error leaves the block. Code inside must not call `context.abort`.

    trailers: asked for metadata of the end, with and without an error.

    Raises CancelledError when the call has ended under us: nobody is left to be answered.
    """
    try:
        try:
            yield
            context.set_trailing_metadata(tuple(trailers()))
        except OutriderError as error:
            note(error)
            text = _shortened(str(error))
            await context.abort(grpc.StatusCode[error.code], text, (*trailers(), *_details_of(error, text)))
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            raise
        except Exception as error:
            note(error)
            log.exception("an RPC failed")
            text = "internal error; the server's log says what happened"
            await context.abort(grpc.StatusCode[InternalError.code], text, tuple(trailers()))
    except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
        # What a write or an abort meets when the client has left and the task has not been cancelled yet.
        log.debug("a call ended under its handler: %s", error)
        raise asyncio.CancelledError from None


def _details_of(error: OutriderError, text: str) -> Trailers:
    """What programs are told of an error besides its code. text: the status's; the two must agree."""
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_shortened(error.field), description=_shortened(error.problem)
        )
        return _packed(error, text, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, OverQuota) and error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(wait_ms := math.ceil(error.retry_after_s * 1000))
        trailers = _packed(error, text, error_details_pb2.RetryInfo(retry_delay=delay))
        return (*trailers, (PUSHBACK_KEY, str(wait_ms)))
    return ()


def _packed(error: OutriderError, text: str, message: Message) -> Trailers:
    detail = any_pb2.Any()
    detail.Pack(message)
    code, _ = grpc.StatusCode[error.code].value
    status = status_pb2.Status(code=code, message=text, details=[detail])
    return tuple(rpc_status.to_status(status).trailing_metadata)


def _shortened(text: str) -> str:
    """Errors quote what a client sent, whatever its length."""
    if len(text) <= MAX_DETAILS_CHARS and len(text.encode()) <= MAX_DETAILS_BYTES:
        return text
    kept = text[: MAX_DETAILS_CHARS - 4].encode()[: MAX_DETAILS_BYTES - 4]
    return f"{kept.decode(errors='ignore')} ..."
