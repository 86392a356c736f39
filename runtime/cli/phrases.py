"""How operator commands say policies, states, sizes, times and rates. Pure; knows messages, and no server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from runtime.verification.policy import Dynamic

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2

NONE = "–"
"""Stands where there is no figure."""


def policy_name(policy: operator_pb2.VerificationPolicy) -> str:
    """off; fixed, gamma 4; dynamic, gamma 1..5, steps within 30 ms."""
    kind = policy.WhichOneof("policy")
    if kind is None:
        return "a policy that this command does not know"
    if kind == "dynamic":
        return ", ".join([kind, *_bounds(policy.dynamic)])
    return f"fixed, gamma {policy.fixed.gamma}" if kind == "fixed" else kind


def _bounds(dynamic: operator_pb2.VerificationPolicy.Dynamic) -> Iterator[str]:
    """What is not as it is by default."""
    if dynamic.gamma_min or dynamic.HasField("gamma_max"):
        yield f"gamma {dynamic.gamma_min}..{dynamic.gamma_max if dynamic.HasField('gamma_max') else 'max'}"
    if dynamic.HasField("itl_limit_ms"):
        yield f"steps within {dynamic.itl_limit_ms:g} ms"
    if dynamic.HasField("min_gain") and dynamic.min_gain != Dynamic().min_gain:
        yield f"gain of at least {dynamic.min_gain:g}"
    if dynamic.min_survival:
        yield f"survival of at least {dynamic.min_survival:g}"


def describe_policy(state: operator_pb2.VerificationPolicyState) -> str:
    """The policy in force in one line."""
    return f"{policy_name(state.policy)} (revision {state.revision}, in force from step {state.effective_step})"


def policy_lines(state: operator_pb2.VerificationPolicyState) -> list[str]:
    """What else there is to know of it: policies of priorities, and why dynamic runs as something else."""
    lines = [f"priority {one.priority}: {policy_name(one.policy)}" for one in state.classes]
    return [*lines, f"dynamic runs as a fixed draft length: {state.fallback}"] if state.fallback else lines


def setter_line(state: operator_pb2.VerificationPolicyState) -> list[str]:
    """Who set it and when; none from a server that does not tell."""
    return [f"set by {state.set_by} at {moment(state.set_at)}"] if state.set_by else []


def moment(unix_s: float) -> str:
    """2026-03-01 12:00:00, as the clocks go here."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s)) if unix_s else NONE


def profile_state(state: operator_pb2.ProfileState) -> str:
    """ok, missing, stale, foreign; the number of one that this command does not know."""
    from outrider.v1 import operator_pb2

    if state not in operator_pb2.ProfileState.values():
        return f"state {state}"
    return operator_pb2.ProfileState.Name(state).removeprefix("PROFILE_STATE_").lower()


def server_state(state: operator_pb2.ServerState) -> str:
    """serving, stalled, withdrawing and so on; the number of one that this command does not know."""
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
