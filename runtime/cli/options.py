"""What several commands accept on their command lines: the address of a server, numbers as messages hold them, text.

Refuses what no message can carry before anyone is asked. Knows no messages and no server.
"""

from __future__ import annotations

from typing import Annotated

import typer

from runtime.cli.console import EXIT_USAGE, fail

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1


def checked_address(address: str | None) -> str | None:
    """host:port, with an IPv6 host in brackets. Ends the command where it is not."""
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    is_bare = host.startswith("[") == host.endswith("]") and (":" not in host or host.startswith("["))
    is_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535
    if not host.strip("[]") or not is_bare or not is_port or not address.isprintable() or " " in address:
        fail(f"--address {address!r}: not of the form host:port, as in 127.0.0.1:50051 or [::1]:50051", EXIT_USAGE)
    return address


Address = Annotated[str, typer.Option(help="Server to talk to, as host:port.", callback=checked_address)]


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
