"""`outrider policy`: reads and switches the speculation policy of running servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from runtime.cli.console import EXIT_USAGE, fail, run
from runtime.cli.options import DEFAULT_TIMEOUT_S, UINT64_MAX, Addresses, Timeout
from runtime.cli.phrases import describe_policy, policy_lines, setter_line
from runtime.cli.policy_advise import advise
from runtime.cli.policy_flags import (
    Gamma,
    GammaMax,
    GammaMin,
    ItlLimitMs,
    MinGain,
    MinSurvival,
    Objective,
    PolicyFlags,
    Priority,
    check_flags,
    policy_message,
)
from runtime.cli.policy_shadow import shadow
from runtime.cli.policy_watch import watch
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
policy.command()(watch)
policy.command()(shadow)
policy.command()(advise)


@policy.command()
def get(addresses: Addresses, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> None:
    """Print the policy in force, who set it and when, and what priorities have of their own."""
    run(_get(addresses, timeout_s))


@policy.command(name="set")
def set_policy(
    mode: Annotated[
        Literal["off", "fixed", "dynamic", "follow"],
        typer.Argument(
            help="off: plain decoding. fixed: the same draft length for all. dynamic: lengths that follow load, "
            "confidence and the hardware profile. follow: a priority follows the others again."
        ),
    ],
    addresses: Addresses,
    gamma: Gamma = None,
    gamma_min: GammaMin = None,
    gamma_max: GammaMax = None,
    objective: Objective = None,
    itl_limit_ms: ItlLimitMs = None,
    min_gain: MinGain = None,
    min_survival: MinSurvival = None,
    priority: Priority = None,
    expected_revision: ExpectedRevision = None,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Switch the policy for all running and coming sequences; no token stream changes by it."""
    flags = PolicyFlags(
        gamma=gamma,
        gamma_min=gamma_min,
        gamma_max=gamma_max,
        objective=objective,
        itl_limit_ms=itl_limit_ms,
        min_gain=min_gain,
        min_survival=min_survival,
    )
    wanted = None
    if mode != "follow":
        wanted = policy_message(mode, flags)
    elif priority is None:
        fail("follow needs --priority N: the priority whose requests shall follow the others", EXIT_USAGE)
    else:
        check_flags(mode, flags)
    run(_set(wanted, priority, expected_revision, addresses, timeout_s))


@policy.command(name="off")
def switch_off(
    addresses: Addresses,
    priority: Priority = None,
    expected_revision: ExpectedRevision = None,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Switch to plain decoding: short for `set off`."""
    run(_set(policy_message("off", PolicyFlags()), priority, expected_revision, addresses, timeout_s))


@policy.command()
def clear(
    addresses: Addresses,
    priority: Annotated[int, typer.Option(min=-(2**31), max=2**31 - 1, help="Whose policy is removed.")],
    expected_revision: ExpectedRevision = None,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Remove the policy of a priority, whose requests follow the others then: short for `set follow`."""
    run(_set(None, priority, expected_revision, addresses, timeout_s))


async def _get(addresses: list[str], timeout_s: float) -> None:
    outcomes = await ask_once(addresses, timeout_s, lambda client: client.get_policy())
    _report(outcomes, lambda state: [*setter_line(state), *policy_lines(state)])


async def _set(
    wanted: operator_pb2.VerificationPolicy | None,
    priority: int | None,
    expected_revision: int | None,
    addresses: list[str],
    timeout_s: float,
) -> None:
    outcomes = await ask_once(
        addresses,
        timeout_s,
        lambda client: client.switch_policy(wanted, expected_revision=expected_revision, priority=priority),
    )
    _report(outcomes, policy_lines)


def _report(
    outcomes: Sequence[Answer[operator_pb2.VerificationPolicyState] | Failure],
    details: Callable[[operator_pb2.VerificationPolicyState], list[str]],
) -> None:
    """details: lines about a state below the first."""
    print_lines(outcomes, lambda state: "\n  ".join([describe_policy(state), *details(state)]))
    finish(print_failures(outcomes))
