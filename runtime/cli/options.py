"""What several commands accept on their command lines: addresses, seconds, numbers as messages hold them, text; and how
one takes many flags.

Refuses what no message can carry before anyone is asked. Knows no messages and no server.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from runtime.cli.console import DEFAULT_ADDRESS, EXIT_USAGE, fail

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1


ADDRESS_VARIABLE = "OUTRIDER_ADDRESS"
"""Environment variable with the addresses that operator commands ask where none is given, comma between them."""


def checked_address(address: str | None) -> str | None:
    """host:port, with an IPv6 host in brackets. Ends the command where it is not."""
    if address is not None:
        _check_address(address, "--address")
    return address


def checked_addresses(given: list[str] | None) -> list[str]:
    """Each address once, in the order given; where none is, those of the environment, else where `outrider serve`
    listens. Ends the command where one is not of the form."""
    addresses, source = given or [], "--address"
    if not addresses:
        text, source = os.environ.get(ADDRESS_VARIABLE, ""), ADDRESS_VARIABLE
        addresses = [part.strip() for part in text.split(",") if part.strip()] or [DEFAULT_ADDRESS]
    for address in addresses:
        _check_address(address, source)
    return list(dict.fromkeys(addresses))


def _check_address(address: str, source: str) -> None:
    host, _, port = address.rpartition(":")
    is_bare = host.startswith("[") == host.endswith("]") and (":" not in host or host.startswith("["))
    is_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535
    if not host.strip("[]") or not is_bare or not is_port or not address.isprintable() or " " in address:
        fail(f"{source} {address!r}: not of the form host:port, as in 127.0.0.1:50051 or [::1]:50051", EXIT_USAGE)


def checked_seconds(seconds: float | None) -> float | None:
    """A number of seconds. Refuses what is none."""
    if seconds is not None and not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is no number of seconds.")
    return seconds


Address = Annotated[str, typer.Option(help="Server to talk to, as host:port.", callback=checked_address)]

Addresses = Annotated[
    list[str],
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help=f"Server to ask; repeat it to ask several. Without it those of ${ADDRESS_VARIABLE} are asked, "
        "comma between them.",
        callback=checked_addresses,
        default_factory=list,
        show_default=DEFAULT_ADDRESS,
    ),
]
"""One or several servers, each once."""

Timeout = Annotated[
    float,
    typer.Option("--timeout-s", min=0.001, help="Longest wait for a server's answer.", callback=checked_seconds),
]
DEFAULT_TIMEOUT_S = 5.0

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document: a list with an entry per server.")]


def checked_text(text: str, what: str) -> str:
    """The text itself. Ends the command where the shell passed bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        fail(f"{what} is not UTF-8 text", EXIT_USAGE)
    return text


def text_of_stdin() -> str:
    """All of standard input, byte for byte. Ends the command where it is not UTF-8."""
    try:
        return typer.get_binary_stream("stdin").read().decode()
    except UnicodeDecodeError as error:
        fail(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}", EXIT_USAGE)


def with_flags(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that has a parameter `flags`, a value of a dataclass: each field of it is a flag of the command.

    kind: the dataclass; its annotations carry what typer is to know of the flags, as those of a parameter do.
    """
    hints = get_type_hints(kind, include_extras=True)
    fields = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for one in dataclasses.fields(kind)
    ]

    def expand(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            flags = kind(**{field.name: given.pop(field.name) for field in fields})
            command(**given, flags=flags)

        own = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for one in inspect.signature(command, eval_str=True).parameters.values()
            if one.name != "flags"
        ]
        parameters = [*own, *fields]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what `inspect` looks for
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return expand
