"""How many drafts to draw and how many to verify: pure functions of load, past survival and measured costs.

Causality. Nothing here takes a draft, a token, or a confidence of drafts that still wait: an `Outlook` is made of what
earlier steps brought, and what it says of step t was fixed before the drafts of step t were drawn. So the budget K is
the same whatever the waiting drafts are, and the ranks, which alone see their scores, may spend it on the best of them.

    draft length γ     of the steady state that commits most tokens per second, drafting and verification both paid
    verify budget K    of this step, for the drafts that wait: each row must bring more than it costs at that rate

Prompts are no part of that rate: their rows are computed once, whatever is drafted, so the time that they take is left
out before tokens are divided by it. Else a step full of prompts would make drafts look cheap. What a draft row costs
beside them does count.

The second is Dinkelbach's form of the first: a ratio Σ tokens / Σ time is largest when every step maximises
tokens − rate · time at the best rate (Management Science 13, 1967).

Shapes: E rows of evidence, G draft positions, N drafts, B numbers of rows of the target pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.verification.costs import CostCurve, Floats, Ints, StepCosts

HYSTERESIS = 0.01
"""Another draft length must promise this much more than the one in use, as a share, and a longer one than a shorter:
what profiles tell is no finer, and long steps keep newcomers waiting."""
MIN_DWELL = 4
"""Steps that a draft length is kept at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What the past lets expect of the drafts of one data-parallel rank's sequences.

    survival_EG: float64 in [0, 1], not rising along G: a draft stands together with all before it. Each row of evidence
        stands for `share` of a sequence, so that E · share sequences decode.
    caps_E: int64, drafts at most. forced_E: int64, drafts that are verified whatever they cost; no more than the cap.
    num_prompt_rows: token rows of prompts in the same pass.
    """

    survival_EG: Floats
    caps_E: Ints
    forced_E: Ints
    share: float
    num_prompt_rows: int = 0

    @property
    def num_sequences(self) -> float:
        return len(self.caps_E) * self.share

    @property
    def num_decodes(self) -> int:
        """The same, as rows of the pass: shares of a sequence add up to whole ones."""
        return round(self.num_sequences)

    @property
    def num_rows(self) -> int:
        """Token rows of the pass beside drafts."""
        return self.num_decodes + self.num_prompt_rows


@dataclass(frozen=True, slots=True)
class Aim:
    """What a plan is for; see policy.Dynamic."""

    itl_limit_ms: float | None = None
    min_gain: float = 0.01
    min_survival: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to run a step.

    gamma: drafts drawn. budgets: draft rows verified at most, per data-parallel rank. rows: of the busiest rank's pass.
    tokens: expected to be committed, by decodes of all ranks. step_ms: predicted. prompt_ms: of that, what a step
    without drafts takes longer for its prompts. covers: nothing that waits is left out.
    """

    gamma: int
    budgets: tuple[int, ...]
    rows: int
    tokens: float
    step_ms: float
    covers: bool
    prompt_ms: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per millisecond of decoding."""
        return self.tokens / (self.step_ms - self.prompt_ms)


@dataclass(slots=True)
class _Ladder:
    """Expected tokens of one rank by budget: entry K for the K drafts that are worth most, the forced ones first."""

    tokens_N: Floats
    num_forced: int
    num_rows: int

    @property
    def num_drafts(self) -> int:
        return len(self.tokens_N) - 1


@dataclass(slots=True)
class Evidence:
    """An outlook with its drafts in the order in which budgets take them: sorted once, read for every draft length."""

    outlook: Outlook
    min_survival: float = 0.0
    _survival_N: Floats = field(init=False)
    _position_N: Ints = field(init=False)
    _forced_N: Ints = field(init=False)

    def __post_init__(self) -> None:
        look = self.outlook
        position_EG = np.broadcast_to(np.arange(look.survival_EG.shape[1]), look.survival_EG.shape)
        forced_EG = position_EG < look.forced_E[:, None]
        counts_EG = (position_EG < look.caps_E[:, None]) & (forced_EG | (look.survival_EG >= self.min_survival))
        survival_N, forced_N = look.survival_EG[counts_EG], forced_EG[counts_EG]
        order = np.argsort(-(survival_N + 2.0 * forced_N), kind="stable")
        self._survival_N, self._forced_N = survival_N[order], forced_N[order].astype(np.int64)
        self._position_N = position_EG[counts_EG][order]

    def ladder(self, gamma: int) -> _Ladder:
        """Of drafts below position `gamma`."""
        look, within_N = self.outlook, self._position_N < gamma
        reached_N = np.concatenate(([0.0], np.cumsum(self._survival_N[within_N]))) * look.share
        # Evidence comes in shares of a draft; budgets are whole ones.
        drafts_N = np.arange(len(reached_N)) * look.share
        num_drafts = round(float(drafts_N[-1]))
        tokens_N = np.interp(np.arange(num_drafts + 1), drafts_N, reached_N)
        return _Ladder(tokens_N, round(float(self._forced_N[within_N].sum()) * look.share), look.num_rows)


def choose(
    evidence: Sequence[Evidence],
    costs: StepCosts,
    aim: Aim,
    *,
    context: float,
    sampled: bool = True,
    gammas: range,
    previous: Choice | None = None,
    dwelt: int = 0,
) -> Choice:
    """The steady state to run in: γ drafts drawn in every step, and so many of them verified.

    evidence: one per data-parallel rank, of the sequences that will decode; at least one does somewhere. context,
    sampled: as in StepCosts. gammas: candidates, rising. previous, dwelt: the last answer, and for how many steps it
    was the answer.

    Of lengths that promise less than HYSTERESIS below the best, the shortest is taken, and of equal budgets the
    smallest. Ordinary decoding, where it is a candidate, stays unless another promises `min_gain` more, and so does the
    length in use unless another promises HYSTERESIS more.
    """
    curve = costs.at(_busiest(evidence), context, sampled=sampled)
    choices = [
        _best(evidence, [one.ladder(gamma) for one in evidence], curve, costs.tiers, aim, gamma, gamma)
        for gamma in gammas
    ]
    best = choices[0]
    for other in choices[1:]:
        if _prefers(other, best, aim):
            best = other
    if _keeps(best, aim):
        near = best.rate / (1 + HYSTERESIS)
        best = next(choice for choice in choices if _keeps(choice, aim) and choice.rate >= near)
    plain = choices[0] if choices[0].gamma == 0 else None
    if plain is not None and best.rate < plain.rate * (1 + aim.min_gain) and _keeps(plain, aim):
        best = plain
    if previous is not None and best.gamma != previous.gamma:
        kept = next((choice for choice in choices if choice.gamma == previous.gamma), None)
        if kept is not None and _keeps(kept, aim) >= _keeps(best, aim):
            is_young = dwelt < MIN_DWELL
            if is_young or best.rate < kept.rate * (1 + HYSTERESIS):
                best = kept
    return best


def spend(
    evidence: Sequence[Evidence],
    costs: StepCosts,
    aim: Aim,
    *,
    context: float,
    sampled: bool = True,
    waiting: int,
    gamma: int,
    rate: float,
) -> Choice:
    """How many of the drafts that wait are verified in a step that draws γ new ones.

    evidence: of the sequences that decode now, with the drafts that wait for them as caps. waiting: the longest of
    those. rate: tokens per millisecond of the steady state; a draft row is admitted while it brings more than it costs
    at this rate. The smallest of equal budgets is taken.
    """
    ladders = [one.ladder(waiting) for one in evidence]
    curve = costs.at(_busiest(evidence), context, sampled=sampled)
    return _best(evidence, ladders, curve, costs.tiers, aim, waiting, gamma, rate)


def _best(
    evidence: Sequence[Evidence],
    ladders: Sequence[_Ladder],
    curve: CostCurve,
    tiers: Sequence[int],
    aim: Aim,
    waiting: int,
    gamma: int,
    rate: float | None = None,
) -> Choice:
    """The best number of rows for all ranks together: they wait for each other, so rows that only fill up to the
    busiest rank's cost nothing. By tokens − rate · time, or by tokens / time where no rate is given."""
    rows_B = _row_counts(ladders, tiers)
    tokens_B = np.full(len(rows_B), sum(one.outlook.num_sequences for one in evidence))
    # In an order of their own: else the last bits of the sum, and of equals the choice, would depend on the ranks'.
    for ladder in sorted(ladders, key=lambda one: (one.num_rows, one.num_forced, one.tokens_N.tobytes())):
        tokens_B += ladder.tokens_N[np.clip(rows_B - ladder.num_rows, ladder.num_forced, ladder.num_drafts)]
    ms_B = curve.step_ms(rows_B, waiting=waiting, gamma=gamma)
    prompt_ms = _prompt_ms(evidence, curve, waiting, gamma)
    value_B = tokens_B / (ms_B - prompt_ms) if rate is None else tokens_B - rate * ms_B
    if aim.itl_limit_ms is not None:
        keeps_B = ms_B <= aim.itl_limit_ms
        # Where nothing keeps to the limit the shortest step is the best.
        value_B = np.where(keeps_B, value_B, -np.inf) if keeps_B.any() else -ms_B
    at = int(np.argmax(value_B))
    rows = int(rows_B[at])
    budgets = tuple(int(min(max(rows - ladder.num_rows, ladder.num_forced), ladder.num_drafts)) for ladder in ladders)
    return Choice(
        gamma=gamma,
        budgets=budgets,
        rows=rows,
        tokens=float(tokens_B[at]),
        step_ms=float(ms_B[at]),
        covers=all(budget == ladder.num_drafts for budget, ladder in zip(budgets, ladders, strict=True)),
        prompt_ms=prompt_ms,
    )


def _prompt_ms(evidence: Sequence[Evidence], curve: CostCurve, waiting: int, gamma: int) -> float:
    """What the prompts of a step add to its time where no draft is verified: ranks wait for the busiest."""
    looks = [one.outlook for one in evidence]
    rows = max(look.num_rows for look in looks)
    rows_of_decodes = max(look.num_decodes for look in looks)
    if rows == rows_of_decodes:
        return 0.0
    without, with_prompts = curve.step_ms(np.array([rows_of_decodes, rows]), waiting=waiting, gamma=gamma)
    return float(with_prompts - without)


def _row_counts(ladders: Sequence[_Ladder], tiers: Sequence[int]) -> Ints:
    """Rows that the busiest rank may have, rising: from what must run to what could. Budgets fill tiers up, since a
    budget that is cut down to a tier once drafts are seen would depend on them."""
    least = max(ladder.num_rows + ladder.num_forced for ladder in ladders)
    most = max(ladder.num_rows + ladder.num_drafts for ladder in ladders)
    if not tiers:
        return np.arange(least, most + 1)
    within = [tier for tier in tiers if least <= tier < most]
    above = next((tier for tier in tiers if tier >= most), None)
    if above is not None:
        return np.array([*within, above])
    # What lies beyond the last tier runs as it is.
    return np.array([*within, *range(max(least, tiers[-1] + 1), most + 1)])


def _busiest(evidence: Sequence[Evidence]) -> int:
    return max(1, *(one.outlook.num_decodes for one in evidence))


def _keeps(choice: Choice, aim: Aim) -> bool:
    return aim.itl_limit_ms is None or choice.step_ms <= aim.itl_limit_ms


def _prefers(one: Choice, other: Choice, aim: Aim) -> bool:
    """Whether the one is strictly better: keeping to the limit first, then by rate; outside the limit, by time."""
    if _keeps(one, aim) != _keeps(other, aim):
        return _keeps(one, aim)
    return one.rate > other.rate if _keeps(one, aim) else one.step_ms < other.step_ms
