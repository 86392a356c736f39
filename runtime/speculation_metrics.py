"""The metrics of the verification policy and of the planner that follows it, as rows of the table in `telemetry.py`."""

from __future__ import annotations

from collections.abc import Callable

from runtime.metric import Kind, Row, Samples, counter, counters, gauge, gauges, positions, status_counter
from runtime.status import EngineStatus
from runtime.verification.policy import Dynamic, Fixed, Off, Policy
from runtime.verification.view import ProfileState, ShadowView, SpeculationView


def _planned(name: str, meaning: str, read: Callable[[SpeculationView], float]) -> Row:
    """A counter of the planner's."""
    return status_counter(name, meaning, lambda status: read(status.speculation))


def _gamma(status: EngineStatus) -> int:
    match status.policy.policy:
        case Off():
            return 0
        case Fixed(gamma=gamma):
            return gamma
        case Dynamic():
            return status.speculation.gamma


def _policy(status: EngineStatus) -> Samples:
    kind = _kind(status.policy.policy)
    return [({"policy": name}, name == kind) for name in ("off", "fixed", "dynamic")]


def _policy_info(status: EngineStatus) -> Samples:
    """Of all that have none of their own, under an empty priority, and of each class."""
    policies: list[tuple[object, Policy]] = [("", status.policy.policy), *status.policy.classes]
    return [
        ({"priority": priority, "policy": _kind(policy), "objective": _objective(policy)}, 1)
        for priority, policy in policies
    ]


def _kind(policy: Policy) -> str:
    return type(policy).__name__.lower()


def _objective(policy: Policy) -> str:
    if not isinstance(policy, Dynamic):
        return ""
    return "throughput" if policy.itl_limit_ms is None else "goodput"


def _profile_state(view: SpeculationView) -> Samples:
    return [({"state": state.value}, view.profile.state is state) for state in ProfileState]


def _shadow(view: SpeculationView, read: Callable[[ShadowView], float]) -> Samples:
    """No sample while there is no shadow."""
    return [] if view.shadow is None else [({}, read(view.shadow))]


def _shadow_pair(view: SpeculationView, own: str, other: str) -> Samples:
    if view.shadow is None:
        return []
    names = {"in_force": own, "shadow": other}
    return [({"policy": policy}, getattr(view.shadow, name)) for policy, name in names.items()]


POLICY_METRICS: tuple[Row, ...] = (
    gauges("outrider_policy", "1 for the verification policy in force.", ("policy",), _policy),
    gauges(
        "outrider_policy_info",
        "1 for the policy and the objective of all without one of their own, the empty priority, and of each priority "
        "that has one.",
        ("priority", "policy", "objective"),
        _policy_info,
    ),
    gauge(
        "outrider_gamma_current", "Drafts per round under the policy in force; the newest step's if dynamic.", _gamma
    ),
    gauge(
        "outrider_policy_fallback",
        "1 while a dynamic policy runs as a fixed draft length.",
        lambda s: bool(s.speculation.fallback),
    ),
    gauge("outrider_budget_current", "Draft rows verified at most in the newest step.", lambda s: s.speculation.budget),
    status_counter(
        "outrider_gamma_changes_total",
        "Times that the verification policy was set, the same one again included.",
        lambda s: s.policy.num_changes,
    ),
)

DRAFT_METRICS: tuple[Row, ...] = (
    counter("outrider_steps_total", "Steps in which a sequence ran.", lambda s: s.steps),
    counter("outrider_rounds_total", "Target passes that emitted, counted per sequence.", lambda s: s.rounds),
    counter("outrider_emitted_tokens_total", "Tokens committed: accepted + rounds - trimmed.", lambda s: s.emitted),
    counter(
        "outrider_trimmed_tokens_total",
        "Tokens verified but cut off by a stop or a limit inside an accepted run.",
        lambda s: s.trimmed,
    ),
    counters(
        "outrider_drafted_tokens_total",
        "Tokens drafted, by draft position, from 0.",
        ("position",),
        lambda s: positions(s.drafted_per_position),
    ),
    counters(
        "outrider_admitted_tokens_total",
        "Drafted tokens sent to verification, by draft position.",
        ("position",),
        lambda s: positions(s.admitted_per_position),
    ),
    counters(
        "outrider_accepted_tokens_total",
        "Admitted tokens that verification let stand, by draft position.",
        ("position",),
        lambda s: positions(s.accepted_per_position),
    ),
    counters(
        "outrider_accepted_prefix_rounds_total",
        "Rounds that drafted, by how many of their drafts stood.",
        ("length",),
        lambda s: [({"length": length}, count) for length, count in enumerate(s.accepted_prefixes)],
    ),
)

PLANNER_METRICS: tuple[Row, ...] = (
    Row(
        name="outrider_gamma_steps_total",
        kind=Kind.COUNTER,
        meaning="Steps, by drafts drawn in them for each sequence.",
        labels=("gamma",),
        read=lambda s: [({"gamma": gamma}, steps) for gamma, steps in enumerate(s.speculation.steps_by_gamma)],
    ),
    _planned("outrider_verify_budget_rows_total", "Draft rows that steps might verify.", lambda v: v.budget_sum),
    _planned(
        "outrider_zero_budget_steps_total",
        "Steps in which drafts waited and none was verified.",
        lambda v: v.zero_budget_steps,
    ),
    _planned(
        "outrider_explored_steps_total",
        "Steps that drafted or verified to learn rather than to gain.",
        lambda v: v.explored_steps,
    ),
    counter(
        "outrider_rollback_tokens_total",
        "Draft rows verified and not accepted.",
        lambda s: sum(s.admitted_per_position) - s.accepted,
    ),
    _planned("outrider_predicted_steps_total", "Steps whose time was predicted.", lambda v: v.predicted_steps),
    _planned(
        "outrider_predicted_step_seconds_total", "Seconds predicted for those steps.", lambda v: v.predicted_sum_s
    ),
    _planned("outrider_measured_step_seconds_total", "Seconds that those steps took.", lambda v: v.measured_sum_s),
    _planned(
        "outrider_prediction_error_seconds_total",
        "Over those steps, the sum of what each prediction was off by.",
        lambda v: v.error_sum_s,
    ),
    gauges(
        "outrider_draft_survival",
        "Estimated share of drafts that stand, by draft position, over the sequences that run.",
        ("position",),
        lambda s: positions(s.speculation.survival_by_position),
    ),
    gauges(
        "outrider_calibration_error",
        "Expected calibration error of the drafter's confidences, by draft position.",
        ("position",),
        lambda s: positions(s.speculation.calibration_error_by_position),
    ),
    gauge(
        "outrider_calibration_version",
        "The step after which confidences were calibrated last; 0 before.",
        lambda s: s.speculation.calibration_version,
    ),
    gauges(
        "outrider_profile_state",
        "1 for the state that the hardware profile is in; dynamic needs ok.",
        ("state",),
        lambda s: _profile_state(s.speculation),
    ),
    # Since a shadow was set; they begin anew with the next one, so they are gauges.
    gauges(
        "outrider_shadow_steps",
        "Steps planned under the shadow policy too, since it was set.",
        (),
        lambda s: _shadow(s.speculation, lambda shadow: shadow.steps),
    ),
    gauges(
        "outrider_shadow_agreed_steps",
        "Of those, steps for which it chose the draft length in force.",
        (),
        lambda s: _shadow(s.speculation, lambda shadow: shadow.agreed),
    ),
    gauges(
        "outrider_shadow_tokens",
        "Over those steps, committed tokens predicted for the policy in force and for the shadow.",
        ("policy",),
        lambda s: _shadow_pair(s.speculation, "tokens", "shadow_tokens"),
    ),
    gauges(
        "outrider_shadow_step_seconds",
        "Over those steps, seconds predicted for the policy in force and for the shadow.",
        ("policy",),
        lambda s: _shadow_pair(s.speculation, "step_s", "shadow_step_s"),
    ),
)
