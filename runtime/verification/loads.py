"""What a planner reads off the loads of a step: what its drafts may bring, what it will cost, who has limits. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.verification.costs import Ints, StepCosts
from runtime.verification.history import History
from runtime.verification.planner import Choice, Outlook
from runtime.verification.rules import Rules
from runtime.verification.speculation import Load

NOBODY: frozenset[int] = frozenset()


def outlook_of(
    load: Load,
    rules: Rules,
    history: History,
    *,
    to_come: bool,
    gamma_max: int,
    explorers: frozenset[int] = NOBODY,
) -> Outlook:
    """Of the drafts that wait now, or of those to come in the steady state, with the sequences that enter it.

    The steady state knows no ends: others take the places of those that end.

    gamma_max: longest draft that is thought of. explorers: sequences all of whose waiting drafts are verified.
    """
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
    if not to_come:
        # What one may still emit beside the token that ends its round.
        useful_R = np.maximum(np.array(load.left, dtype=np.int64) - 1, 0)
        caps_R = np.minimum(np.array(load.waiting, dtype=np.int64), useful_R)
        if explorers:
            forced_R = np.where([uid in explorers for uid in uids], caps_R, forced_R)
    return history.outlook(
        uids,
        np.array([one.temperature_class for one in traits], dtype=np.int64),
        np.minimum(caps_R, gamma_max),
        np.minimum(forced_R, caps_R),
        num_prompt_rows=max(0, prompt_rows),
    )


def mean_context(loads: Sequence[Load]) -> float:
    """Mean committed length of the sequences that decode, tokens; 1 where none does."""
    lengths = [length for load in loads for length in load.committed]
    return sum(lengths) / len(lengths) if lengths else 1.0


def is_sampled(loads: Sequence[Load]) -> bool:
    """Whether any sequence that decodes, or may in this step, is not greedy."""
    return any(one.temperature_class for load in loads for one in (*load.traits, *load.entering_traits))


def predicted(loads: Sequence[Load], costs: StepCosts, *, gamma: int, budgets: tuple[int, ...] | None = None) -> Choice:
    """A step in which so much of what waits is verified; everything where no budgets are given."""
    waiting_rows = [sum(load.waiting) for load in loads]
    spent = tuple(waiting_rows) if budgets is None else budgets
    rows = max(
        min(load.max_rows, len(load.uids) + drafts + load.num_prompt_rows)
        for load, drafts in zip(loads, spent, strict=True)
    )
    curve = costs.at(max(1, max(len(load.uids) for load in loads)), mean_context(loads), sampled=is_sampled(loads))
    waiting = max((waiting for load in loads for waiting in load.waiting), default=0)
    step_ms = float(curve.step_ms(np.array([rows]), waiting=waiting, gamma=gamma)[0])
    tokens = float(sum(len(load.uids) for load in loads))
    return Choice(gamma=gamma, budgets=spent, rows=rows, tokens=tokens, step_ms=step_ms, covers=budgets is None)


def longest_useful(loads: Sequence[Load]) -> int | None:
    """Drafts beyond which none drawn in this step can be emitted by anybody; None where sequences enter or wait to: all
    may be of use to those."""
    if any(load.num_prompt_rows for load in loads):
        return None
    # One token more by then, and another one ends the round.
    return max((max(0, left - 2) for load in loads for left in load.left), default=None)


def limits_of(
    load: Load,
    rules: Rules,
    gamma: int,
    *,
    spares_ends: bool = False,
    explores: tuple[int, frozenset[int]] | None = None,
) -> dict[int, int]:
    """Drafts that may wait after the step, where that is less than γ.

    spares_ends: none beyond what a sequence may still emit. explores: the draft length of all but some sequences, and
    those.
    """
    rule_of = rules.of_load(load)
    has_room = not spares_ends or min(load.left, default=gamma + 2) >= gamma + 2
    if explores is None and has_room and all(rule.cap >= gamma for rule in rule_of.values()):
        return {}  # as in most steps of most servers
    limits = {}
    room = [*load.left, *[gamma + 2] * len(load.entering)] if spares_ends else None
    traits = (*load.traits, *load.entering_traits)
    for place, (uid, one) in enumerate(zip((*load.uids, *load.entering), traits, strict=True)):
        limit = rule_of[one].cap
        if room is not None:
            limit = min(limit, max(0, room[place] - 2))
        if explores is not None and uid not in explores[1]:
            limit = min(limit, explores[0])
        if limit < gamma:
            limits[uid] = limit
    return limits


def forced_of(load: Load, rules: Rules, explorers: frozenset[int] = NOBODY) -> dict[int, int]:
    """Waiting drafts that are verified whatever they cost, but for those that the sequence's end would cut off.

    explorers: sequences all of whose drafts are.
    """
    rule_of = rules.of_load(load)
    if not explorers and not any(rule.forced for rule in rule_of.values()):
        return {}
    forced = {}
    for uid, traits, waiting, left in zip(load.uids, load.traits, load.waiting, load.left, strict=True):
        forced_here = waiting if uid in explorers else rule_of[traits].forced
        count = min(forced_here, waiting, max(left - 1, 0))
        if count:
            forced[uid] = count
    return forced
