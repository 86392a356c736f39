"""From the error tree to gRPC statuses, at the edge of every RPC. Knows no service."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from runtime.front.errors import InternalError, OutriderError

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Trailers = Sequence[tuple[str, str]]


@asynccontextmanager
async def answering(context: Context, trailers: Callable[[], Trailers] = tuple) -> AsyncIterator[None]:
    """Ends the RPC with the status of whatever error leaves the block. Code inside must not call `context.abort`.

    trailers: asked for metadata of the end, with and without an error.
    """
    try:
        yield
        context.set_trailing_metadata(tuple(trailers()))
    except OutriderError as error:
        await context.abort(grpc.StatusCode[error.code], str(error), tuple(trailers()))
    except Exception:
        # A write to a call that has just ended raises whatever the transport finds; nobody is left to be answered.
        if context.done():
            raise
        log.exception("an RPC failed")
        text = "internal error; the server's log says what happened"
        await context.abort(grpc.StatusCode[InternalError.code], text, tuple(trailers()))
