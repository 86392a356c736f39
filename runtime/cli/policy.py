"""`outrider policy`: reads and switches the speculation policy of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from runtime.cli.console import DEFAULT_ADDRESS, EXIT_USAGE, OUT, fail, run
from runtime.cli.options import UINT32_MAX, UINT64_MAX, Address

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2

policy = typer.Typer(no_args_is_help=True, help="Read or switch the speculation policy of a running server.")


@policy.command()
def get(address: Address = DEFAULT_ADDRESS) -> None:
    """Print the policy in force."""
    run(_get(address))


@policy.command(name="set")
def set_policy(
    mode: Annotated[
        Literal["off", "fixed"], typer.Argument(help="off: plain decoding. fixed: the same draft length for all.")
    ],
    gamma: Annotated[int | None, typer.Option(min=0, max=UINT32_MAX, help="Drafts per round; fixed needs it.")] = None,
    expected_revision: Annotated[
        int | None, typer.Option(min=0, max=UINT64_MAX, help="Refuse if the policy changed since this revision.")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Switch the policy for all running and coming sequences; no token stream changes by it."""
    if (mode == "fixed") != (gamma is not None):
        fail("--gamma N goes with fixed, and only with it", EXIT_USAGE)
    run(_set(address, gamma, expected_revision))


async def _get(address: str) -> None:
    from runtime.front.client import OutriderClient

    async with OutriderClient(address) as client:
        OUT.print(describe(await client.get_policy()))


async def _set(address: str, gamma: int | None, expected_revision: int | None) -> None:
    from runtime.front.client import OutriderClient

    async with OutriderClient(address) as client:
        OUT.print(describe(await client.set_policy(gamma, expected_revision=expected_revision)))


def describe(state: operator_pb2.VerificationPolicyState) -> str:
    """The policy in one line."""
    name = "off" if state.policy.WhichOneof("policy") == "off" else f"fixed, gamma {state.policy.fixed.gamma}"
    return f"{name} (revision {state.revision}, in force from step {state.effective_step})"
