"""What each draft length would bring, by measured costs and learnt survival, and which to use. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.front.errors import MissingFeature
from runtime.geometric import geometric_length
from runtime.verification.costs import Floats, StepCosts
from runtime.verification.history import History
from runtime.verification.planner import Aim, Choice, Evidence, Outlook, choose
from runtime.verification.policy import Dynamic, Fixed, Off, Policy
from runtime.verification.view import Advice, AdviceReport

ENOUGH_REACHED = 32
"""Positions that verification must have reached before rates are worth advice."""
WORTH_SAYING = 1.01
"""Lengths whose rates differ by less are as good as each other."""
USUAL_CONTEXT = 64


def advise(
    history: History,
    costs: StepCosts,
    policy: Policy,
    uids: Sequence[int],
    *,
    num_sequences: int,
    context: float,
    sampled: bool,
) -> AdviceReport:
    """Advice for `num_sequences` on a data-parallel rank, like those of `uids` that run now.

    policy: in force, to compare with. Raises MissingFeature while too little has been drafted.
    """
    if history.calibrator.num_reached < ENOUGH_REACHED:
        raise MissingFeature(
            f"survival: only {history.calibrator.num_reached:.0f} drafted positions were verified whole so far, and "
            f"advice takes {ENOUGH_REACHED}; let requests run under a policy that drafts"
        )
    gamma_max = min(history.gamma_max, costs.gamma_max)
    survival_EG = _survival(history, uids)
    num_rows = len(survival_EG)
    evidence = [
        Evidence(
            Outlook(
                survival_EG=survival_EG,
                caps_E=np.full(num_rows, gamma_max, dtype=np.int64),
                forced_E=np.zeros(num_rows, dtype=np.int64),
                share=num_sequences / num_rows,
            )
        )
    ]
    choices = [
        choose(evidence, costs, Aim(min_gain=0.0), context=context, sampled=sampled, gammas=range(gamma, gamma + 1))
        for gamma in range(gamma_max + 1)
    ]
    acceptance = history.calibrator.acceptance
    best = choices[0]
    for choice in choices[1:]:
        if choice.rate > best.rate * WORTH_SAYING:
            best = choice
    return AdviceReport(
        num_sequences=num_sequences,
        context=round(context),
        advice=tuple(
            Advice(
                gamma=choice.gamma,
                budget=choice.budgets[0],
                tokens=choice.tokens / num_sequences,
                geometric_tokens=geometric_length(acceptance, choice.gamma),
                step_s=choice.step_ms / 1000,
                tokens_per_s=choice.rate * 1000,
            )
            for choice in choices
        ),
        acceptance=acceptance,
        survival_by_position=tuple(survival_EG.mean(0).tolist()),
        best_gamma=best.gamma,
        sentence=_sentence(acceptance, policy, choices, best, num_sequences),
        reliability=history.calibrator.reliability(),
        calibration_error_by_position=history.calibrator.errors(),
    )


def _survival(history: History, uids: Sequence[int]) -> Floats:
    known = [uid for uid in uids if history.survivals.step_of(uid) >= 0]
    prior_G = history.usual_survival()
    if not known:
        return prior_G[None]
    survival_EG, _, _ = history.survivals.evidence(known, np.broadcast_to(prior_G, (len(known), len(prior_G))))
    return survival_EG


def _sentence(acceptance: float, policy: Policy, choices: Sequence[Choice], best: Choice, num_sequences: int) -> str:
    load = f"{num_sequences} sequence{'s' if num_sequences != 1 else ''}"
    use = f"gamma {best.gamma}" if best.gamma else "ordinary decoding"
    match policy:
        case Fixed(gamma=gamma) if gamma < len(choices):
            here, where = choices[gamma], f"acceptance {acceptance:.2f} at gamma {gamma} and {load}"
        case Off():
            here, where = choices[0], f"acceptance {acceptance:.2f}, without speculation and at {load}"
        case _:
            plain = f"{best.rate / choices[0].rate:.2f} times the tokens per second of ordinary decoding"
            # Bounds and limits may keep a policy from the best.
            finds = "finds it by itself" if policy == Dynamic() else "is in force"
            return f"acceptance {acceptance:.2f} at {load}: {use} is best now, with {plain}; {policy} {finds}"
    gain = best.rate / here.rate
    if gain < WORTH_SAYING:
        return f"{where}: keep it, no other length promises {WORTH_SAYING - 1:.0%} more"
    return f"{where}: use {use}, which promises {gain:.2f} times the tokens per second"
