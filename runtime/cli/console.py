"""How commands talk to the terminal and end: consoles, one-line errors, exit codes. Knows no command.

0    done, or stopped as asked (Ctrl-C or SIGTERM while serving)
1    the answer is no (`outrider health`: not serving), or a defect of ours
2    the command line or a setting is wrong
3    the server did not start
4    the server cannot be reached, is draining, or lost its worker
5    the server refused the request
130  interrupted

A command that asks several servers ends with the gravest of their codes: 1 before 5 before 4, which a second try may
cure. The answers of the others are printed all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Coroutine, Iterator
from typing import Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.markup import escape

from configs.load import SettingsError
from configs.schema import ServerSettings
from runtime.front.errors import InvalidRequest, OutriderError, Unavailable
from workers.address import join_address
from workers.plan import WorkerError

EXIT_NO = 1
EXIT_USAGE = 2
EXIT_START = 3
EXIT_UNAVAILABLE = 4
EXIT_REFUSED = 5
EXIT_INTERRUPTED = 130

DEFAULT_ADDRESS = join_address(ServerSettings().host, ServerSettings().port)
"""Where `outrider serve` listens when it is told nothing."""


class _PipedConsole(Console):
    """Leaves the end of its reader to `guarded`, where rich ends the process as failed."""

    def on_broken_pipe(self) -> None:
        raise  # the error in hand: rich calls this where it caught it


OUT = _PipedConsole(highlight=False)
ERR = _PipedConsole(stderr=True, highlight=False)
_WIDE = _PipedConsole(highlight=False, width=400)
"""For output to no terminal: wider than any table, and none fills it."""


def complain(message: str) -> None:
    """Prints the error on standard error."""
    for line in message.splitlines() or [""]:
        ERR.print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True)


def fail(message: str, code: int) -> NoReturn:
    """Prints the error on standard error and ends the command."""
    complain(message)
    raise typer.Exit(code)


def show(renderable: RenderableType) -> None:
    """Prints a table or a panel; where the output is no terminal, as wide as its content needs."""
    (OUT if OUT.is_terminal else _WIDE).print(renderable)


def natural_width(renderable: RenderableType) -> int:
    """Columns that it takes where there is room enough."""
    return _WIDE.measure(renderable).maximum


def write(text: str) -> None:
    """Streams text as it is: no markup, no wrapping."""
    if sys.stdout is not None:  # None where it was closed before we came
        sys.stdout.write(text)
        sys.stdout.flush()


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Around what a server says while it works: whoever read it may have gone, or the disk be full. It goes on."""
    try:
        yield
    except OSError:
        try:
            sys.stdout.flush()
        except OSError:  # what Python would still write at exit goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(work: Coroutine[Any, Any, None]) -> None:
    """Runs a command's coroutine, guarded. Ends the process at once where Ray would keep it from ending."""
    try:
        with guarded():
            asyncio.run(work)
    except typer.Exit as ended:
        _end_despite_ray(ended.exit_code)
        raise
    _end_despite_ray(0)


def _end_despite_ray(code: int) -> None:
    """A thread of ours that waits for a lost cluster holds the lock that Ray's own exit takes: the interpreter would
    never end. All that is ours has ended by then; what is skipped is Ray's."""
    session = sys.modules.get("runtime.cluster.ray_session")  # there where a deployment was on Ray
    if session is not None and session.is_held():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """What is raised inside becomes one line and an exit code.

    OUTRIDER_TRACEBACK=1 shows the traceback of what went wrong.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output went away (`outrider generate ... | head`); nobody is left to tell.
        # What Python still flushes at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except Exception as error:
        known = explain(error)
        if known is None or os.environ.get("OUTRIDER_TRACEBACK"):
            raise
        fail(*known)


def explain(error: BaseException) -> tuple[str, int] | None:
    """Message and exit code of an error that a user can meet; None for a defect of ours."""
    if isinstance(error, SettingsError | InvalidRequest):
        return str(error), EXIT_USAGE
    if isinstance(error, Unavailable):
        return str(error), EXIT_UNAVAILABLE
    if isinstance(error, OutriderError):
        return str(error), EXIT_REFUSED
    if isinstance(error, WorkerError | OSError | TimeoutError):
        return str(error) or type(error).__name__, EXIT_START
    grpc = sys.modules.get("grpc")  # imported long before it can raise; importing it here would slow every command
    if grpc is not None and isinstance(error, grpc.aio.AioRpcError):
        code = error.code()
        text = f"{code.name}: {error.details()}"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            text += (
                "; the server does not know this call: it serves operators on another port, is older than this "
                "command, or is no Outrider"
            )
        if code is grpc.StatusCode.UNAUTHENTICATED:
            text += "; before the command's name: --token-file, or --cert and --key"
        if code is grpc.StatusCode.UNAVAILABLE and "Socket closed" in text:
            text += "; a server that speaks TLS wants --ca before the command's name, and perhaps --cert and --key"
        unavailable = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return text, EXIT_UNAVAILABLE if unavailable else EXIT_REFUSED
    return None
