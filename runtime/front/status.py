"""From the error tree to gRPC statuses, at the edge of every RPC. Knows no service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from runtime.front.errors import InternalError, OutriderError

log = logging.getLogger(__name__)

MAX_DETAILS_CHARS = 600
"""Details travel in a header, where a character may take 12 bytes and peers take 8 KiB in all."""

Context = grpc.aio.ServicerContext[Any, Any]
Trailers = Sequence[tuple[str, str]]


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
            await context.abort(grpc.StatusCode[error.code], _shortened(str(error)), tuple(trailers()))
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            raise
        except Exception:
            log.exception("an RPC failed")
            text = "internal error; the server's log says what happened"
            await context.abort(grpc.StatusCode[InternalError.code], text, tuple(trailers()))
    except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
        # What a write or an abort meets when the client has left and the task has not been cancelled yet.
        log.debug("a call ended under its handler: %s", error)
        raise asyncio.CancelledError from None


def _shortened(text: str) -> str:
    """Errors quote what a client sent, whatever its length."""
    return text if len(text) <= MAX_DETAILS_CHARS else f"{text[: MAX_DETAILS_CHARS - 4]} ..."
