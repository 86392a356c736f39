"""`outrider policy shadow`: what another policy would do on running servers, before anyone switches to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from runtime.cli.console import run
from runtime.cli.options import DEFAULT_TIMEOUT_S, Addresses, Timeout
from runtime.cli.phrases import NONE, optional, policy_name, ratio
from runtime.cli.policy_flags import (
    Gamma,
    GammaMax,
    GammaMin,
    ItlLimitMs,
    MinGain,
    MinSurvival,
    Objective,
    PolicyFlags,
    check_flags,
    policy_message,
)
from runtime.cli.replicas import Answer, Failure, ask_once, finish, print_failures, print_lines

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2
    from runtime.front.client import OutriderClient


def shadow(
    mode: Annotated[
        Literal["show", "off", "fixed", "dynamic"],
        typer.Argument(
            help="fixed, dynamic: plan this policy from now on. show: what it would have done so far. off: end it."
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
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Plan a second policy beside the one in force, and compare what is predicted for both; nothing is run by it.

    `fixed --gamma 0` is plain decoding. A server has one shadow at a time.
    """
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
    if mode in ("fixed", "dynamic"):
        wanted = policy_message(mode, flags)
    else:
        check_flags(mode, flags)
    run(_show(addresses, timeout_s) if mode == "show" else _set(wanted, addresses, timeout_s))


async def _show(addresses: list[str], timeout_s: float) -> None:
    async def ask(client: OutriderClient) -> operator_pb2.ShadowStatus:
        return (await client.get_status()).speculation.shadow

    _report(await ask_once(addresses, timeout_s, ask))


async def _set(wanted: operator_pb2.VerificationPolicy | None, addresses: list[str], timeout_s: float) -> None:
    _report(await ask_once(addresses, timeout_s, lambda client: client.set_shadow(wanted)))


def _report(outcomes: Sequence[Answer[operator_pb2.ShadowStatus] | Failure]) -> None:
    print_lines(outcomes, describe_shadow)
    finish(print_failures(outcomes))


def describe_shadow(status: operator_pb2.ShadowStatus) -> str:
    """One line where there is nothing to compare yet, else a few."""
    if not status.HasField("policy"):
        return "no shadow"
    name = f"shadow {policy_name(status.policy)}"
    if not status.steps:
        return f"{name}: no step planned yet"
    gammas = ", ".join(f"{gamma} in {steps}" for gamma, steps in enumerate(status.steps_by_gamma) if steps)
    return "\n  ".join(
        [
            f"{name}: {status.steps} steps, {status.agreed / status.steps:.0%} of them with the draft length in force",
            f"in force: {_rate(status.tokens, status.step_s, status.steps)}",
            f"shadow:   {_rate(status.shadow_tokens, status.shadow_step_s, status.steps)}",
            f"draft lengths of the shadow: {gammas or NONE}",
        ]
    )


def _rate(tokens: float, step_s: float, steps: int) -> str:
    return (
        f"{optional(ratio(tokens, step_s), '.1f')} tokens/s predicted, {tokens / steps:.2f} tokens and "
        f"{1000 * step_s / steps:.2f} ms per step"
    )
