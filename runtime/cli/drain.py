"""`outrider drain` and `outrider resume`: servers that take no requests for a while, and what still runs on them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli.console import ERR, EXIT_NO, EXIT_USAGE, OUT, complain, fail, run
from runtime.cli.options import DEFAULT_TIMEOUT_S, Addresses, Timeout, checked_seconds
from runtime.cli.phrases import server_state
from runtime.cli.replicas import (
    Answer,
    Failure,
    Replicas,
    answers_of,
    ask_once,
    finish,
    gravest,
    labelled,
    print_failures,
    print_lines,
)

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2

INTERVAL_S = 0.5
"""Between two questions of how much still runs."""

IDLE = "nothing is live"


def drain(
    addresses: Addresses,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return as soon as the servers know.")] = False,
    wait_s: Annotated[
        float | None,
        typer.Option(min=0, help="Longest wait for live requests; without end if left out.", callback=checked_seconds),
    ] = None,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Refuse new requests and wait until live ones have ended.

    Ctrl-C ends the waiting alone: servers drain until `outrider resume`. Exit code 1 where requests are live after
    --wait-s, or somebody resumed a server meanwhile.
    """
    if no_wait and wait_s is not None:
        fail("--wait-s says how long to wait, --no-wait not to; leave one out", EXIT_USAGE)
    run(_drain(addresses, timeout_s, wait_s, no_wait))


async def _drain(addresses: list[str], timeout_s: float, wait_s: float | None, no_wait: bool) -> None:
    async with Replicas(addresses, timeout_s) as replicas:
        outcomes = await replicas.ask(lambda client: client.drain())
        print_lines(outcomes, describe_drain)
        failed = print_failures(outcomes)
        live = {
            answer.address: describe_live(answer.value.running, answer.value.waiting) for answer in answers_of(outcomes)
        }
        waiting = Waiting(replicas, {} if no_wait else live)
        try:
            await waiting.until_idle(wait_s)
        except asyncio.CancelledError:
            ERR.print("not waiting any longer; the servers drain on until `outrider resume`", soft_wrap=True)
            raise
    finish(failed, waiting.code)


class Waiting:
    """Follows servers that drain, and prints each change of what is live there.

    live: what was printed of each server, as `describe_live` says it.
    code: the gravest exit code of those that did not become idle.
    clock, sleep: in seconds.
    """

    def __init__(
        self,
        replicas: Replicas,
        live: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.code = 0
        self._replicas = replicas
        self._live = {address: text for address, text in live.items() if text != IDLE}
        self._clock = clock
        self._sleep = sleep

    async def until_idle(self, wait_s: float | None) -> None:
        """Returns when no server is waited for any longer, after `wait_s` at the latest."""
        deadline_s = math.inf if wait_s is None else self._clock() + wait_s
        while self._live:
            for outcome in await self._replicas.ask(lambda client: client.get_status(), list(self._live)):
                self._note(outcome)
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                for address in list(self._live):
                    self._give_up(address, f"requests are live after {wait_s:g} s; the server drains on", EXIT_NO)
            if self._live:
                await self._sleep(min(INTERVAL_S, left_s))

    def _note(self, outcome: Answer[operator_pb2.GetStatusResponse] | Failure) -> None:
        from outrider.v1 import operator_pb2

        address = outcome.address
        if isinstance(outcome, Failure):
            self._give_up(address, outcome.message, outcome.code)
        elif outcome.value.state == operator_pb2.SERVER_STATE_SERVING:
            self._give_up(address, "takes requests again: somebody resumed it", EXIT_NO)
        else:
            live = describe_live(sum(batch.running for batch in outcome.value.batches), outcome.value.waiting)
            if live != self._live[address]:
                self._live[address] = live
                OUT.print(self._labelled(address, live), markup=False, soft_wrap=True)
            if live == IDLE:
                del self._live[address]

    def _give_up(self, address: str, message: str, code: int) -> None:
        del self._live[address]
        self.code = gravest((self.code, code))
        complain(self._labelled(address, message))

    def _labelled(self, address: str, text: str) -> str:
        return labelled(address, text, len(self._replicas.addresses))


def describe_drain(reply: operator_pb2.DrainResponse) -> str:
    return f"{server_state(reply.state)}: {describe_live(reply.running, reply.waiting)}"


def describe_live(running: int, waiting: int) -> str:
    return f"{running} running, {waiting} waiting" if running or waiting else IDLE


def resume(addresses: Addresses, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> None:
    """Have drained servers take requests again."""
    run(_resume(addresses, timeout_s))


async def _resume(addresses: list[str], timeout_s: float) -> None:
    outcomes = await ask_once(addresses, timeout_s, lambda client: client.resume())
    print_lines(outcomes, lambda reply: server_state(reply.state))
    finish(print_failures(outcomes))
