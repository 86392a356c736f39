"""`outrider policy`: reads and switches the speculation policy of running servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from runtime.cli.console import EXIT_USAGE, fail, run
from runtime.cli.options import DEFAULT_TIMEOUT_S, UINT32_MAX, UINT64_MAX, Addresses, Timeout
from runtime.cli.phrases import describe_policy
from runtime.cli.replicas import Answer, Failure, ask_once, finish, print_failures, print_lines

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2

ExpectedRevision = Annotated[
    int | None,
    typer.Option(
        min=0, max=UINT64_MAX, help="Refuse where the policy changed since this revision; each server has its own."
    ),
]

policy = typer.Typer(no_args_is_help=True, help="Read or switch the speculation policy of running servers.")


@policy.command()
def get(addresses: Addresses, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> None:
    """Print the policy in force."""
    run(_get(addresses, timeout_s))


@policy.command(name="set")
def set_policy(
    mode: Annotated[
        Literal["off", "fixed", "dynamic"],
        typer.Argument(
            help="off: plain decoding. fixed: the same draft length for all. dynamic: lengths that follow the load, "
            "where the server has what that needs."
        ),
    ],
    addresses: Addresses,
    gamma: Annotated[int | None, typer.Option(min=0, max=UINT32_MAX, help="Drafts per round; fixed needs it.")] = None,
    expected_revision: ExpectedRevision = None,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Switch the policy for all running and coming sequences; no token stream changes by it."""
    if (mode == "fixed") != (gamma is not None):
        fail("--gamma N goes with fixed, and only with it", EXIT_USAGE)
    run(_set(mode, gamma, expected_revision, addresses, timeout_s))


@policy.command(name="off")
def switch_off(
    addresses: Addresses, expected_revision: ExpectedRevision = None, timeout_s: Timeout = DEFAULT_TIMEOUT_S
) -> None:
    """Switch to plain decoding: short for `set off`."""
    run(_set("off", None, expected_revision, addresses, timeout_s))


async def _get(addresses: list[str], timeout_s: float) -> None:
    _report(await ask_once(addresses, timeout_s, lambda client: client.get_policy()))


async def _set(
    mode: str, gamma: int | None, expected_revision: int | None, addresses: list[str], timeout_s: float
) -> None:
    wanted = policy_message(mode, gamma)
    _report(
        await ask_once(
            addresses,
            timeout_s,
            lambda client: client.switch_policy(wanted, expected_revision=expected_revision),
        )
    )


def policy_message(mode: str, gamma: int | None) -> operator_pb2.VerificationPolicy:
    """gamma: goes with fixed."""
    from outrider.v1 import operator_pb2

    wanted = operator_pb2.VerificationPolicy()
    getattr(wanted, mode).SetInParent()
    if gamma is not None:
        wanted.fixed.gamma = gamma
    return wanted


def _report(outcomes: Sequence[Answer[operator_pb2.VerificationPolicyState] | Failure]) -> None:
    print_lines(outcomes, describe_policy)
    finish(print_failures(outcomes))
