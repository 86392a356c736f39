"""How operator commands say policies, states, sizes, times and rates. Pure; knows messages, and no server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2

NONE = "–"
"""Stands where there is no figure."""


def policy_name(policy: operator_pb2.VerificationPolicy) -> str:
    """off; fixed, gamma 4; dynamic."""
    kind = policy.WhichOneof("policy")
    if kind is None:
        return "a policy that this command does not know"
    return f"fixed, gamma {policy.fixed.gamma}" if kind == "fixed" else kind


def describe_policy(state: operator_pb2.VerificationPolicyState) -> str:
    """The policy in force in one line."""
    return f"{policy_name(state.policy)} (revision {state.revision}, in force from step {state.effective_step})"


def server_state(state: operator_pb2.ServerState) -> str:
    """serving, draining, recovering, stopping; the number of one that this command does not know."""
    from outrider.v1 import operator_pb2

    if state not in operator_pb2.ServerState.values():
        return f"state {state}"
    return operator_pb2.ServerState.Name(state).removeprefix("SERVER_STATE_").lower()


def request_state(state: operator_pb2.RequestState) -> str:
    """waiting, prefilling, decoding; the number of one that this command does not know."""
    from outrider.v1 import operator_pb2

    if state not in operator_pb2.RequestState.values():
        return f"state {state}"
    return operator_pb2.RequestState.Name(state).removeprefix("REQUEST_STATE_").lower()


def use(used: int, total: int) -> str:
    """12 / 64 (19%)"""
    return f"{used} / {total} ({used / total:.0%})" if total else f"{used} / {total}"


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.4g} MiB"


def duration(seconds: float) -> str:
    """Two units at most: 4.2 s, 3 min 20 s, 5 h 7 min, 2 d 1 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hours} h {minute} min" if hours else f"{minutes} min {second} s"


def ratio(part: float, whole: float) -> float | None:
    """None where there is nothing to divide by."""
    return part / whole if whole else None


def optional(figure: float | None, form: str) -> str:
    return NONE if figure is None else format(figure, form)


def acceptance(accepted: Sequence[int], drafted: Sequence[int]) -> tuple[float, ...]:
    """Entry k: of the rounds that drafted more than k tokens, the share in which draft k stood. Ends with the longest
    draft there was."""
    return tuple(stood / asked for stood, asked in zip(accepted, drafted, strict=False) if asked)


def by_position(rates: Sequence[float]) -> str:
    """0.81 0.64 0.50"""
    return " ".join(f"{rate:.2f}" for rate in rates) or NONE
