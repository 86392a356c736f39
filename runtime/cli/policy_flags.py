"""The flags that make up a policy on a command line, and the message they make. Knows no server.

A flag that does not go with the mode is refused by name before anyone is asked; numbers are the server's to judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from runtime.cli.console import EXIT_USAGE, fail
from runtime.cli.options import UINT32_MAX

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2

Gamma = Annotated[int | None, typer.Option(min=0, max=UINT32_MAX, help="fixed: drafts per round; it needs it.")]
GammaMin = Annotated[
    int | None,
    typer.Option(min=0, max=UINT32_MAX, help="dynamic: drafts per round that are made whatever they cost; 0 if unset."),
]
GammaMax = Annotated[
    int | None, typer.Option(min=0, max=UINT32_MAX, help="dynamic: drafts per round at most; the server's if unset.")
]
Objective = Annotated[
    Literal["throughput", "goodput"] | None,
    typer.Option(
        help="dynamic: most tokens per second, or most of those within --itl-limit-ms; goodput where that is given."
    ),
]
ItlLimitMs = Annotated[
    float | None, typer.Option(help="dynamic, goodput: longest time from one delivery of a stream to the next.")
]
MinGain = Annotated[
    float | None,
    typer.Option(help="dynamic: share by which speculation must promise more than plain decoding; 0.01 if unset."),
]
MinSurvival = Annotated[
    float | None, typer.Option(help="dynamic: drafts less likely to stand than this are not verified; 0 if unset.")
]
Priority = Annotated[
    int | None,
    typer.Option(
        min=-(2**31), max=2**31 - 1, help="Only requests of this priority; without it, all that have no own policy."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFlags:
    """As they were given; None where they were not."""

    gamma: int | None = None
    gamma_min: int | None = None
    gamma_max: int | None = None
    objective: Literal["throughput", "goodput"] | None = None
    itl_limit_ms: float | None = None
    min_gain: float | None = None
    min_survival: float | None = None


_OF_MODE = {
    "fixed": ("gamma",),
    "dynamic": ("gamma_min", "gamma_max", "objective", "itl_limit_ms", "min_gain", "min_survival"),
}


def policy_message(mode: str, flags: PolicyFlags) -> operator_pb2.VerificationPolicy:
    """mode: off, fixed or dynamic. Ends the command where a flag does not go with it, or is missing."""
    check_flags(mode, flags)
    from outrider.v1 import operator_pb2

    if mode == "off":
        return operator_pb2.VerificationPolicy(off=operator_pb2.VerificationPolicy.Off())
    if mode == "fixed":
        return operator_pb2.VerificationPolicy(fixed=operator_pb2.VerificationPolicy.Fixed(gamma=flags.gamma))
    objectives = {"throughput": operator_pb2.OBJECTIVE_THROUGHPUT, "goodput": operator_pb2.OBJECTIVE_GOODPUT}
    dynamic = operator_pb2.VerificationPolicy.Dynamic(
        gamma_min=flags.gamma_min,
        gamma_max=flags.gamma_max,
        objective=None if flags.objective is None else objectives[flags.objective],
        itl_limit_ms=flags.itl_limit_ms,
        min_gain=flags.min_gain,
        min_survival=flags.min_survival,
    )
    return operator_pb2.VerificationPolicy(dynamic=dynamic)


def check_flags(mode: str, flags: PolicyFlags) -> None:
    """Ends the command where a flag does not go with the mode, or is missing."""
    for owner, names in _OF_MODE.items():
        for name in names:
            if owner != mode and getattr(flags, name) is not None:
                fail(f"{_option(name)} goes with {owner}, not with {mode}; leave it out", EXIT_USAGE)
    if mode == "fixed" and flags.gamma is None:
        fail("fixed needs --gamma N, the drafts per round", EXIT_USAGE)
    if flags.objective == "goodput" and flags.itl_limit_ms is None:
        fail("--objective goodput needs --itl-limit-ms, the limit that it keeps to", EXIT_USAGE)
    if flags.objective == "throughput" and flags.itl_limit_ms is not None:
        fail("--itl-limit-ms goes with --objective goodput, not with throughput; leave one out", EXIT_USAGE)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
