"""What a planner reads off the loads of a step: what its drafts may bring, what it will cost, who has limits. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.verification.costs import Ints, StepCosts
from runtime.verification.history import History
from runtime.verification.planner import Choice, Outlook
from runtime.verification.rules import Rules
from runtime.verification.speculation import Load


def outlook_of(load: Load, rules: Rules, history: History, *, to_come: bool, gamma_max: int) -> Outlook:
    """Of the drafts that wait now, or of those to come in the steady state, with the sequences that enter it.

    gamma_max: longest draft that is thought of."""
    uids: tuple[int, ...] = load.uids
    traits = load.traits
    prompt_rows = min(load.num_prompt_rows, load.max_rows - len(load.uids))
    if to_come:
        uids, traits = (*uids, *load.entering), (*traits, *load.entering_traits)
        # Of prompts, what this step leaves over.
        prompt_rows = min(load.num_prompt_rows - prompt_rows, load.max_rows - len(uids))
    per_rule = [rules.of_request(one) for one in traits]
    caps_R: Ints = np.array([rule.cap for rule in per_rule], dtype=np.int64)
    forced_R: Ints = np.array([rule.forced for rule in per_rule], dtype=np.int64)
    # In a step to come a sequence has emitted one token more, and another one ends its last round.
    left_R = np.array([*load.left, *[gamma_max + 2] * (len(uids) - len(load.uids))], dtype=np.int64)
    useful_R = np.maximum(left_R - (2 if to_come else 1), 0)
    caps_R = np.minimum(caps_R, useful_R if to_come else np.array(load.waiting, dtype=np.int64))
    return history.outlook(
        uids,
        np.array([one.temperature_class for one in traits], dtype=np.int64),
        np.minimum(caps_R, gamma_max),
        np.minimum(forced_R, caps_R),
        num_rows=len(uids) + max(0, prompt_rows),
    )


def mean_context(loads: Sequence[Load]) -> float:
    """Mean committed length of the sequences that decode, tokens; 1 where none does."""
    lengths = [length for load in loads for length in load.committed]
    return sum(lengths) / len(lengths) if lengths else 1.0


def is_sampled(loads: Sequence[Load]) -> bool:
    """Whether any sequence that decodes, or may in this step, is not greedy."""
    return any(one.temperature_class for load in loads for one in (*load.traits, *load.entering_traits))


def predicted(loads: Sequence[Load], costs: StepCosts, *, gamma: int) -> Choice:
    """A step in which all that waits is verified."""
    rows = max(min(load.max_rows, len(load.uids) + sum(load.waiting) + load.num_prompt_rows) for load in loads)
    budgets = tuple(sum(load.waiting) for load in loads)
    curve = costs.at(max(1, max(len(load.uids) for load in loads)), mean_context(loads), sampled=is_sampled(loads))
    waiting = max((waiting for load in loads for waiting in load.waiting), default=0)
    step_ms = float(curve.step_ms(np.array([rows]), waiting=waiting, gamma=gamma)[0])
    tokens = float(sum(len(load.uids) for load in loads))
    return Choice(gamma=gamma, budgets=budgets, rows=rows, tokens=tokens, step_ms=step_ms, covers=True)


def limits_of(load: Load, rules: Rules, gamma: int, *, spares_ends: bool = False) -> dict[int, int]:
    """Drafts that may wait after the step, where that is less than γ. spares_ends: none beyond what a sequence may
    still emit."""
    limits = {}
    room = [*load.left, *[gamma + 2] * len(load.entering)] if spares_ends else None
    traits = (*load.traits, *load.entering_traits)
    for place, (uid, one) in enumerate(zip((*load.uids, *load.entering), traits, strict=True)):
        limit = rules.of_request(one).cap
        if room is not None:
            limit = min(limit, max(0, room[place] - 2))
        if limit < gamma:
            limits[uid] = limit
    return limits


def forced_of(load: Load, rules: Rules) -> dict[int, int]:
    """Waiting drafts that are verified whatever they cost, but for those that the sequence's end would cut off."""
    forced = {}
    for uid, traits, waiting, left in zip(load.uids, load.traits, load.waiting, load.left, strict=True):
        count = min(rules.of_request(traits).forced, waiting, max(left - 1, 0))
        if count:
            forced[uid] = count
    return forced
