"""Messages about the speculation policy to domain values and back: policies, shadow, advice. Knows no engine.

What depends on the server, such as how long a draft may be, is the engine's to check.
"""

from __future__ import annotations

from typing import assert_never

from outrider.v1 import operator_pb2
from runtime.front.errors import InvalidRequest
from runtime.statistics import EngineStatistics
from runtime.verification.policy import Dynamic, Fixed, Off, Policy, PolicyState
from runtime.verification.view import AdviceReport, ProfileState, ShadowView, SpeculationView

MAX_ADVISED_SEQUENCES = 4096

_PROFILE_STATES = {
    ProfileState.OK: operator_pb2.PROFILE_STATE_OK,
    ProfileState.MISSING: operator_pb2.PROFILE_STATE_MISSING,
    ProfileState.STALE: operator_pb2.PROFILE_STATE_STALE,
    ProfileState.FOREIGN: operator_pb2.PROFILE_STATE_FOREIGN,
}


def policy_of(message: operator_pb2.VerificationPolicy) -> Policy:
    """The policy an operator asks for. Raises InvalidRequest."""
    match message.WhichOneof("policy"):
        case "off":
            return Off()
        case "fixed":
            return Fixed(message.fixed.gamma)
        case "dynamic":
            return _dynamic_of(message.dynamic)
        case _:
            raise InvalidRequest("policy", "none is given; set off, fixed or dynamic")


def _dynamic_of(message: operator_pb2.VerificationPolicy.Dynamic) -> Dynamic:
    """Raises InvalidRequest where the objective and the limit do not go together."""
    has_limit = message.HasField("itl_limit_ms")
    match message.objective:
        case operator_pb2.OBJECTIVE_UNSPECIFIED:
            pass
        case operator_pb2.OBJECTIVE_THROUGHPUT if has_limit:
            raise InvalidRequest(
                "policy.dynamic.itl_limit_ms", "throughput keeps to no limit; leave it out, or aim at OBJECTIVE_GOODPUT"
            )
        case operator_pb2.OBJECTIVE_THROUGHPUT:
            pass
        case operator_pb2.OBJECTIVE_GOODPUT if not has_limit:
            raise InvalidRequest(
                "policy.dynamic.itl_limit_ms", "is missing, and goodput is what keeps to it; set it, in milliseconds"
            )
        case operator_pb2.OBJECTIVE_GOODPUT:
            pass
        case _:
            names = ", ".join(operator_pb2.Objective.keys()[1:])
            raise InvalidRequest("policy.dynamic.objective", f"{message.objective} is unknown; choose {names}")
    defaults = Dynamic()
    return Dynamic(
        gamma_min=message.gamma_min,
        gamma_max=message.gamma_max if message.HasField("gamma_max") else None,
        itl_limit_ms=message.itl_limit_ms if has_limit else None,
        min_gain=message.min_gain if message.HasField("min_gain") else defaults.min_gain,
        min_survival=message.min_survival if message.HasField("min_survival") else defaults.min_survival,
    )


def change_of(message: operator_pb2.SetVerificationPolicyRequest) -> tuple[Policy | None, int | None]:
    """The policy and the priority whose policy it is; None for no policy of its own, and for all others.
    Raises InvalidRequest."""
    priority = message.priority if message.HasField("priority") else None
    if priority is not None and not message.HasField("policy"):
        return None, priority
    return policy_of(message.policy), priority


def shadow_of(message: operator_pb2.SetShadowPolicyRequest) -> Policy | None:
    """None ends the shadow. Raises InvalidRequest."""
    return policy_of(message.policy) if message.HasField("policy") else None


def load_of(message: operator_pb2.AdvisePolicyRequest) -> tuple[int | None, int | None]:
    """Sequences and their mean length in tokens, None where the server's own are meant. Raises InvalidRequest."""
    num_sequences = message.num_sequences if message.HasField("num_sequences") else None
    context = message.context if message.HasField("context") else None
    if num_sequences is not None and not 1 <= num_sequences <= MAX_ADVISED_SEQUENCES:
        raise InvalidRequest(
            "num_sequences",
            f"{num_sequences} is not from 1 to {MAX_ADVISED_SEQUENCES}; leave it out for those that run",
        )
    if context == 0:
        raise InvalidRequest("context", "0 is no length of a sequence; leave it out for that of those that run")
    return num_sequences, context


def policy_message(policy: Policy) -> operator_pb2.VerificationPolicy:
    message = operator_pb2.VerificationPolicy()
    match policy:
        case Off():
            message.off.SetInParent()
        case Fixed(gamma=gamma):
            message.fixed.gamma = gamma
        case Dynamic():
            goodput = policy.itl_limit_ms is not None
            message.dynamic.CopyFrom(
                operator_pb2.VerificationPolicy.Dynamic(
                    gamma_min=policy.gamma_min,
                    gamma_max=policy.gamma_max,
                    objective=operator_pb2.OBJECTIVE_GOODPUT if goodput else operator_pb2.OBJECTIVE_THROUGHPUT,
                    itl_limit_ms=policy.itl_limit_ms,
                    min_gain=policy.min_gain,
                    min_survival=policy.min_survival,
                )
            )
        case _:
            assert_never(policy)
    return message


def policy_state_message(state: PolicyState, *, fallback: str) -> operator_pb2.VerificationPolicyState:
    """fallback: why `dynamic` runs as a fixed draft length at the moment."""
    return operator_pb2.VerificationPolicyState(
        policy=policy_message(state.policy),
        revision=state.revision,
        effective_step=state.effective_step,
        classes=[
            operator_pb2.ClassPolicy(priority=priority, policy=policy_message(own)) for priority, own in state.classes
        ],
        set_by=state.set_by,
        set_at=state.set_at,
        fallback=fallback,
    )


def shadow_message(shadow: ShadowView | None) -> operator_pb2.ShadowStatus:
    """Empty while there is no shadow."""
    if shadow is None:
        return operator_pb2.ShadowStatus()
    return operator_pb2.ShadowStatus(
        policy=policy_message(shadow.policy),
        steps=shadow.steps,
        agreed=shadow.agreed,
        tokens=shadow.tokens,
        step_s=shadow.step_s,
        shadow_tokens=shadow.shadow_tokens,
        shadow_step_s=shadow.shadow_step_s,
        steps_by_gamma=shadow.steps_by_gamma,
    )


def advice_message(report: AdviceReport) -> operator_pb2.AdvisePolicyResponse:
    return operator_pb2.AdvisePolicyResponse(
        num_sequences=report.num_sequences,
        context=report.context,
        advice=[
            operator_pb2.Advice(
                gamma=one.gamma,
                budget=one.budget,
                tokens=one.tokens,
                geometric_tokens=one.geometric_tokens,
                step_s=one.step_s,
                tokens_per_s=one.tokens_per_s,
            )
            for one in report.advice
        ],
        acceptance=report.acceptance,
        survival_by_position=report.survival_by_position,
        best_gamma=report.best_gamma,
        sentence=report.sentence,
        reliability=[
            operator_pb2.Reliability(
                bins=[
                    operator_pb2.ReliabilityBin(confidence=one.confidence, acceptance=one.acceptance, weight=one.weight)
                    for one in bins
                ]
            )
            for bins in report.reliability
        ],
        calibration_error_by_position=report.calibration_error_by_position,
    )


def profile_state_message(state: ProfileState) -> operator_pb2.ProfileState:
    return _PROFILE_STATES[state]


def speculation_message(view: SpeculationView, statistics: EngineStatistics) -> operator_pb2.SpeculationStatus:
    """statistics: of the same moment."""
    return operator_pb2.SpeculationStatus(
        profile=profile_state_message(view.profile.state),
        profile_detail=view.profile.detail,
        gamma=view.gamma,
        budget=view.budget,
        rows=view.rows,
        predicted_s=view.predicted_s,
        measured_s=view.measured_s,
        predicted_steps=view.predicted_steps,
        predicted_sum_s=view.predicted_sum_s,
        measured_sum_s=view.measured_sum_s,
        error_sum_s=view.error_sum_s,
        zero_budget_steps=view.zero_budget_steps,
        explored_steps=view.explored_steps,
        steps_by_gamma=view.steps_by_gamma,
        budget_sum=view.budget_sum,
        survival_by_position=view.survival_by_position,
        calibration_error_by_position=view.calibration_error_by_position,
        calibration_version=view.calibration_version,
        rollback_tokens=sum(statistics.admitted_per_position) - statistics.accepted,
        shadow=shadow_message(view.shadow),
    )
