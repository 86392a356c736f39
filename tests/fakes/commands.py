"""Commands against servers of the test's own event loop, and addresses at which nobody answers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
from click.testing import Result
from typer.testing import CliRunner

from runtime.cli.main import app

Outrider = Callable[..., Awaitable[Result]]


def outrider_in_loop(monkeypatch: pytest.MonkeyPatch) -> Outrider:
    """The command, in a thread that hands its coroutine to the running loop: gRPC serves one loop per process well.

    One command at a time: each runs with standard output and error of its own in the place of the process's.
    """
    turn = threading.Lock()

    async def call(*arguments: str) -> Result:
        assert turn.acquire(blocking=False), "two commands at a time write into each other's output"
        loop = asyncio.get_running_loop()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(asyncio, "run", lambda work: asyncio.run_coroutine_threadsafe(work, loop).result())
                return await asyncio.to_thread(CliRunner().invoke, app, arguments)
        finally:
            turn.release()

    return call


@contextmanager
def closed_port() -> Iterator[str]:
    """A loopback address at which connections are refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening
        yield f"127.0.0.1:{held.getsockname()[1]}"


@contextmanager
def silent_port() -> Iterator[str]:
    """A loopback address that takes connections and never says a word."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield f"127.0.0.1:{held.getsockname()[1]}"
