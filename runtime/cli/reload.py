"""`outrider reload`: servers that read their configuration again, and what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.cli.console import run
from runtime.cli.options import DEFAULT_TIMEOUT_S, Addresses, Timeout
from runtime.cli.replicas import ask_once, finish, print_failures, print_lines

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2


def reload(addresses: Addresses, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> None:
    """Have servers read their configuration file, certificates and identities again.

    What is safe to change is in force at once, and what needs a restart is named. A bad configuration is refused as a
    whole; the one before stays.
    """
    run(_reload(addresses, timeout_s))


async def _reload(addresses: list[str], timeout_s: float) -> None:
    outcomes = await ask_once(addresses, timeout_s, lambda client: client.reload())
    print_lines(outcomes, describe_reload)
    finish(print_failures(outcomes))


def describe_reload(reply: operator_pb2.ReloadResponse) -> str:
    """What is in force now, and below it a line for each setting that is as it was."""
    applied = ", ".join(reply.applied)
    first = f"in force: {applied}" if applied else "nothing new is in force"
    return "\n  ".join((first, *(f"{one.key} {one.reason}" for one in reply.held_back)))
