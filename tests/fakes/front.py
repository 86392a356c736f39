"""A real front over the fake engine: a gRPC server on a free loopback port and a client of it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from fakes.engine import FakeEngine

from configs.load import demo_checkpoint
from outrider.v1 import inference_pb2, types_pb2
from runtime.front.client import OutriderClient
from runtime.front.credentials import Credentials
from runtime.front.defaults import SamplingDefaults
from runtime.front.hub import StreamHub
from runtime.front.server import FrontServer
from runtime.front.tokenizer import Tokenizer
from runtime.in_force import SettingsInForce
from runtime.observe.records import UNOBSERVED, Observer
from runtime.reload import Reloader, SettingsSource
from runtime.request import Request

TOKENIZER = Tokenizer.load(demo_checkpoint())
TIMEOUT_S = 20.0
"""Longest test: something hangs past it."""


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(TIMEOUT_S):
                await test(*args, **kwargs)

        asyncio.run(limited())

    return run


@dataclass(frozen=True, slots=True)
class Front:
    engine: FakeEngine
    hub: StreamHub
    server: FrontServer
    settings: SettingsInForce
    address: str
    client: OutriderClient


@asynccontextmanager
async def serving(
    script: Sequence[int] | Callable[[Request], Sequence[int]] = (65, 66, 67),
    *,
    steps_by_itself: bool = True,
    settings: Mapping[str, Any] | None = None,
    observer: Observer = UNOBSERVED,
    credentials: Credentials | None = None,
    path: Path | None = None,
    **engine_options: Any,
) -> AsyncIterator[Front]:
    """A started server and a connected client; both are closed at the end.

    script: output tokens, for all requests or per request. steps_by_itself: else the test calls `engine.step()`.
    credentials: of the client. path: a settings file, which the server can be told to read again.
    """
    source = SettingsSource(path=path, overrides={"server.port": 0, **(settings or {})})
    served = SettingsInForce(source.load())
    hub = StreamHub(served)
    engine = FakeEngine(hub, script if callable(script) else lambda request: script, **engine_options)
    server = FrontServer(served, Reloader(served, source), observer)
    try:
        await server.listen()
        await server.open(engine, hub, TOKENIZER, defaults=SamplingDefaults())
        # The group ends the test when the engine's task fails: nobody would answer it.
        async with asyncio.TaskGroup() as tasks, OutriderClient(server.address, credentials) as client:
            running = tasks.create_task(engine.run()) if steps_by_itself else None
            yield Front(engine, hub, server, served, server.address, client)
            if running is not None:
                running.cancel()
    finally:
        await server.stop(0)


def request_for(
    *,
    text: str | None = None,
    ids: Sequence[int] = (1,),
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    **fields: Any,
) -> inference_pb2.GenerateRequest:
    """A request message from what tests say most."""
    stopping = types_pb2.Stopping(
        max_tokens=max_tokens, stop=stop, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
    )
    if text is not None:
        return inference_pb2.GenerateRequest(text=text, stopping=stopping, **fields)
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids), stopping=stopping, **fields)


async def status_of(call: Awaitable[Any] | AsyncIterator[Any]) -> tuple[grpc.StatusCode, str]:
    """Code and text of a call that must fail."""
    try:
        if isinstance(call, AsyncIterator) or hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("the call succeeded")
