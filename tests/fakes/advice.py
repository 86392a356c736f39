"""Advice and a view of a planner in which no figure stands twice, so that one taken for another is seen."""

from __future__ import annotations

from runtime.verification.policy import Dynamic
from runtime.verification.view import (
    Advice,
    AdviceReport,
    ProfileState,
    ProfileStatus,
    ReliabilityBin,
    ShadowView,
    SpeculationView,
)

ADVICE = AdviceReport(
    num_sequences=17,
    context=1300,
    advice=tuple(
        Advice(
            gamma=gamma,
            budget=20 * gamma,
            tokens=1 + 0.5 * gamma,
            geometric_tokens=1 + 0.625 * gamma,
            step_s=0.01 + 0.001 * gamma,
            tokens_per_s=1700.0 + 11 * gamma,
        )
        for gamma in range(3)
    ),
    acceptance=0.6875,
    survival_by_position=(0.75, 0.4375),
    best_gamma=2,
    sentence="acceptance 0.69 at γ=1: use 2",
    reliability=(
        (
            ReliabilityBin(confidence=0.25, acceptance=0.3125, weight=40.0),
            ReliabilityBin(confidence=0.875, acceptance=0.8125, weight=60.0),
        ),
        (ReliabilityBin(confidence=0.5625, acceptance=0.53125, weight=30.0),),
    ),
    calibration_error_by_position=(0.0625, 0.03125),
)

SHADOW = ShadowView(
    policy=Dynamic(gamma_max=3, itl_limit_ms=40.0),
    steps=601,
    agreed=602,
    tokens=603.5,
    step_s=604.5,
    shadow_tokens=605.5,
    shadow_step_s=606.5,
    steps_by_gamma=(607, 608),
)

VIEW = SpeculationView(
    profile=ProfileStatus(state=ProfileState.STALE, detail="measured in spring"),
    gamma=2,
    budget=621,
    rows=622,
    predicted_s=0.623,
    measured_s=0.624,
    predicted_steps=625,
    predicted_sum_s=626.5,
    measured_sum_s=627.5,
    error_sum_s=628.5,
    zero_budget_steps=629,
    explored_steps=630,
    steps_by_gamma=(631, 632, 633),
    budget_sum=634,
    survival_by_position=(0.875, 0.5),
    calibration_error_by_position=(0.03125, 0.0625),
    calibration_version=635,
    fallback="the profile is stale",
    shadow=SHADOW,
)
