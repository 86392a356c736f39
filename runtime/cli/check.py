"""`outrider check`: the books of running servers against themselves and their ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.cli.console import EXIT_NO, run
from runtime.cli.options import DEFAULT_TIMEOUT_S, Addresses, Timeout
from runtime.cli.replicas import answers_of, ask_once, finish, print_failures, print_lines

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2


def check(addresses: Addresses, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> None:
    """Check the books of servers and the pools of their ranks; exit code 1 where an invariant is violated.

    Ranks check themselves between two steps, which wait for it.
    """
    run(_check(addresses, timeout_s))


async def _check(addresses: list[str], timeout_s: float) -> None:
    outcomes = await ask_once(addresses, timeout_s, lambda client: client.check_integrity())
    print_lines(outcomes, describe_check)
    is_violated = any(answer.value.violations for answer in answers_of(outcomes))
    finish(print_failures(outcomes), EXIT_NO if is_violated else 0)


def describe_check(reply: operator_pb2.CheckIntegrityResponse) -> str:
    """The verdict, and below it a line per violation."""
    num_violations = len(reply.violations)
    verdict = _counted(num_violations, "violation") if num_violations else "all invariants hold"
    ranks = f"{_counted(reply.ranks_checked, 'rank')} checked"
    return "\n  ".join((f"{verdict}; {ranks}", *reply.violations))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
