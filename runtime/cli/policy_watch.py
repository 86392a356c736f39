"""`outrider policy watch`: a line for each change of the policy of running servers, as it happens."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli.console import EXIT_UNAVAILABLE, OUT, complain, explain, run, write
from runtime.cli.credentials import credentials
from runtime.cli.options import DEFAULT_TIMEOUT_S, Addresses, Timeout
from runtime.cli.phrases import moment, policy_lines, policy_name
from runtime.cli.replicas import Answer, entry_of, finish, gravest, labelled

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2


def watch(
    addresses: Addresses,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object per line: the server's address, and the state.")
    ] = False,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Print the policy in force and then each change of it, until Ctrl-C: when, step, revision, who, and what.

    Changes that come faster than they are read are told as one. --timeout-s bounds the wait for the first state.
    """
    run(_watch(addresses, timeout_s, as_json))


async def _watch(addresses: list[str], timeout_s: float, as_json: bool) -> None:
    following = (_follow(address, timeout_s, as_json, num_servers=len(addresses)) for address in addresses)
    try:
        codes = await asyncio.gather(*following)
    except asyncio.CancelledError:
        return  # Ctrl-C: how one leaves
    finish(gravest(codes))


async def _follow(address: str, timeout_s: float, as_json: bool, *, num_servers: int) -> int:
    """Prints what one server tells until its watch ends, and then why. Returns the exit code of that."""
    from grpc.aio import AioRpcError

    from runtime.front.client import OutriderClient

    async with OutriderClient(address, credentials()) as client:
        states = aiter(client.watch_policy())
        try:
            async with asyncio.timeout(timeout_s):
                state = await anext(states)
            while True:
                answer = Answer(address=address, value=state)
                if as_json:
                    write(json.dumps(entry_of(answer), sort_keys=True, ensure_ascii=False) + "\n")
                else:
                    OUT.print(labelled(address, change_line(state), num_servers), markup=False, soft_wrap=True)
                state = await anext(states)
        except TimeoutError:
            message, code = f"DEADLINE_EXCEEDED: no answer within {timeout_s:g} s", EXIT_UNAVAILABLE
        except StopAsyncIteration:
            message, code = "the server ended the watch", EXIT_UNAVAILABLE
        except AioRpcError as error:
            known = explain(error)
            assert known is not None
            message, code = known
    complain(labelled(address, message, num_servers))
    return code


def change_line(state: operator_pb2.VerificationPolicyState) -> str:
    """2026-03-01 12:00:00 step 17 revision 3 by ipv4:127.0.0.1:41234: off; priority 3: fixed, gamma 2"""
    what = "; ".join([policy_name(state.policy), *policy_lines(state)])
    who = state.set_by or "nobody known"
    return f"{moment(state.set_at)} step {state.effective_step} revision {state.revision} by {who}: {what}"
