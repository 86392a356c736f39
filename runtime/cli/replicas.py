"""One question to several servers at once: from each an answer, or why there is none. Knows no command.

A server that cannot be reached hides nobody else's answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

import typer

from runtime.cli.console import EXIT_NO, EXIT_REFUSED, EXIT_UNAVAILABLE, OUT, complain, explain
from runtime.cli.credentials import credentials

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from runtime.front.client import OutriderClient

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_BY_GRAVITY = (0, EXIT_UNAVAILABLE, EXIT_REFUSED, EXIT_NO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[T_co]):
    address: str
    value: T_co


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """message: one line. code: what a command that asked this server alone ends with."""

    address: str
    message: str
    code: int


class Replicas:
    """Clients of all the servers; `async with` closes them.

    timeout_s: longest wait for each answer.
    """

    def __init__(self, addresses: Sequence[str], timeout_s: float) -> None:
        self.addresses = tuple(addresses)
        self._timeout_s = timeout_s
        self._credentials = credentials()
        self._clients: dict[str, OutriderClient] = {}

    async def __aenter__(self) -> Replicas:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            await client.close()

    async def ask(
        self, question: Callable[[OutriderClient], Awaitable[T]], addresses: Iterable[str] | None = None
    ) -> list[Answer[T] | Failure]:
        """Asks all servers at once, or some of them; in their order."""
        return await asyncio.gather(
            *(self._ask_one(address, question) for address in (self.addresses if addresses is None else addresses))
        )

    async def _ask_one(self, address: str, question: Callable[[OutriderClient], Awaitable[T]]) -> Answer[T] | Failure:
        from grpc.aio import AioRpcError

        from runtime.front.client import OutriderClient

        client = self._clients.get(address) or OutriderClient(address, self._credentials)
        self._clients[address] = client
        try:
            async with asyncio.timeout(self._timeout_s):
                return Answer(address=address, value=await question(client))
        except TimeoutError:
            message, code = f"DEADLINE_EXCEEDED: no answer within {self._timeout_s:g} s", EXIT_UNAVAILABLE
        except AioRpcError as error:
            known = explain(error)
            assert known is not None
            message, code = known
        # The next question dials anew: a channel that failed waits ever longer before it tries again.
        del self._clients[address]
        await client.close()
        return Failure(address=address, message=message, code=code)


async def ask_once(
    addresses: Sequence[str], timeout_s: float, question: Callable[[OutriderClient], Awaitable[T]]
) -> list[Answer[T] | Failure]:
    """One question to all servers at once."""
    async with Replicas(addresses, timeout_s) as replicas:
        return await replicas.ask(question)


def answers_of(outcomes: Iterable[Answer[T] | Failure]) -> list[Answer[T]]:
    """Those that answered."""
    return [outcome for outcome in outcomes if isinstance(outcome, Answer)]


def labelled(address: str, text: str, num_servers: int) -> str:
    """The text, after its server's address where several were asked."""
    return f"{address}: {text}" if num_servers > 1 else text


def print_lines(outcomes: Sequence[Answer[T] | Failure], line: Callable[[T], str]) -> None:
    """One line per answer."""
    for answer in answers_of(outcomes):
        OUT.print(labelled(answer.address, line(answer.value), len(outcomes)), markup=False, soft_wrap=True)


def print_failures(outcomes: Sequence[Answer[T] | Failure]) -> int:
    """The errors, on standard error. Returns the gravest code, 0 where all answered."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    for failure in failures:
        complain(labelled(failure.address, failure.message, len(outcomes)))
    return gravest(failure.code for failure in failures)


def json_of(outcomes: Iterable[Answer[Message] | Failure]) -> str:
    """A list with an entry per server."""
    return json.dumps([entry_of(one) for one in outcomes], indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def entry_of(outcome: Answer[Message] | Failure) -> dict[str, object]:
    """A server's address, and its answer or its error.

    Answers are in protobuf's JSON form with the names of the .proto file; 64-bit counters are strings there.
    """
    from google.protobuf.json_format import MessageToDict

    if isinstance(outcome, Failure):
        return {"address": outcome.address, "error": outcome.message}
    answer = MessageToDict(outcome.value, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {"address": outcome.address, "answer": answer}


def gravest(codes: Iterable[int]) -> int:
    """The exit code that stands for several."""
    return max(codes, key=_BY_GRAVITY.index, default=0)


def finish(*codes: int) -> None:
    """Ends the command with the gravest code; returns where all is well."""
    code = gravest(codes)
    if code:
        raise typer.Exit(code)
