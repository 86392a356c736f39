"""The enumeration rejects rules that look at a draft to decide on it, by the very bias that is known of them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from admission import wrong_rules
from admission.cliffs import ONE_REQUEST_MS, TWO_REQUEST_MS, first, mirrored, second, steady
from admission.rounds import KeyReused
from admission.worlds import Admission, World, as_served
from draft.admission_laws import RequestModel

from workers.sampling.randomness import KeyUse, Purpose

SURE = 1
"""Tokens that are the same in every output, before the laws under test begin: the first is the prompt's."""

ONE = {"models": [first(SURE)], "max_tokens": SURE + 3}
TWO = {"models": [first(SURE), second(SURE)], "max_tokens": SURE + 3}


def world(admission: Admission = as_served, *, gamma: int = 2, budget: int = 9, **of: Any) -> World:
    """One round of drafts under a budget that was fixed beforehand."""
    return World(
        **{"host": wrong_rules.told(gamma, {2: budget}), "step_ids": (1, 2), "admission": admission, **of},
    )


@pytest.mark.parametrize("budget", range(5))
def test_a_budget_fixed_beforehand_is_exact(budget: int) -> None:
    assert world(budget=budget, **ONE).bias() == 0
    assert world(budget=budget, **TWO | {"models": [first(SURE), mirrored(SURE)]}).bias() == 0


def test_the_best_budget_by_present_confidences_is_rejected() -> None:
    assert world(wrong_rules.best_of_the_present(ONE_REQUEST_MS), **ONE).bias() == Fraction(1, 9)


def test_the_best_budget_of_the_batch_by_present_confidences_is_rejected() -> None:
    there = world(wrong_rules.best_of_the_present(TWO_REQUEST_MS), **TWO)
    assert there.bias(SURE + 1) == Fraction(1, 15)


def test_rows_rounded_down_to_a_tier_are_rejected_and_rows_filled_up_are_not() -> None:
    assert world(wrong_rules.fitted_to((1, 3), up=False), **ONE).bias() == Fraction(1, 9)
    assert world(wrong_rules.fitted_to((1, 3), up=True), **ONE).bias() == 0


def tied(x: tuple[int, ...]) -> float:
    """Survival 1/2 at the first position, and at the second if the first draft is 0."""
    return 0.5 if len(x) == SURE else float(x[-1] == 0)


RIVALS = [
    RequestModel(p=second(SURE).p, q=second(SURE).q, confidence=lambda x: 0.5 if len(x) == SURE else 0.0),
    RequestModel(p=first(SURE).p, q=first(SURE).q, confidence=tied),
]


@pytest.mark.parametrize("rule", [wrong_rules.by_lot, wrong_rules.later_slots_first])
def test_ties_that_a_draft_may_win_by_what_follows_it_are_rejected(rule: Admission) -> None:
    of = TWO | {"models": RIVALS}
    assert world(rule, budget=1, **of).bias() > 0
    assert world(budget=1, **of).bias() == 0


def test_survival_that_grows_along_a_draft_is_rejected() -> None:
    """A factor of 4, after draft 0, would carry the second draft past the rival's."""
    growing = RequestModel(
        p=first(SURE).p, q=first(SURE).q, confidence=lambda x: 0.5 if len(x) == SURE else 4.0 * (x[-1] == 0)
    )
    rival = RequestModel(p=second(SURE).p, q=second(SURE).q, confidence=lambda x: 0.75 if len(x) == SURE else 0.0)
    of = TWO | {"models": [growing, rival]}
    # The identity calibration gives no factor above 1: the wrong rule reads them where they come from.
    assert world(unclipped_of([growing, rival]), budget=1, **of).bias() == Fraction(1, 9)
    assert world(budget=1, **of).bias() == 0


def unclipped_of(models: list[RequestModel]) -> Admission:
    def rule(look: wrong_rules.Look) -> list[tuple[Fraction, tuple[int, ...]]]:
        raw = tuple(
            tuple(models[uid - 1].confidence((*prefix, *drafts[:j])) for j in range(len(drafts)))
            for uid, prefix, drafts in zip(look.uids, look.prefixes, look.drafts, strict=True)
        )
        return wrong_rules.unclipped(wrong_rules.replace(look, confidences=raw))

    return rule


def test_a_stop_of_the_batch_by_the_sum_of_present_survivals_is_rejected() -> None:
    """Whether the rival's second draft is there to be preferred depends on what the first request drew."""
    sure = steady("1/2", "1/2", lead=SURE)
    of = TWO | {"models": [first(SURE), sure]}
    assert world(wrong_rules.batch_stops(1.5), budget=2, **of).bias(SURE + 1) == Fraction(1, 9)
    assert world(budget=2, **of).bias() == 0


def test_putting_off_a_request_once_its_drafts_were_looked_at_is_rejected() -> None:
    assert world(wrong_rules.preempting(1), **ONE).bias(SURE + 1) == Fraction(1, 9)


def test_a_threshold_on_the_drawn_token_is_rejected_and_one_on_its_law_is_not() -> None:
    models = [steady("1/2", "1/4", lead=SURE)]
    of = {"models": models, "max_tokens": SURE + 1, "gamma": 1}
    half = Fraction(1, 2)
    assert world(wrong_rules.own_threshold(models, half), **of).bias() == Fraction(1, 8)
    assert world(wrong_rules.threshold_before_the_draw(models, half), **of).bias() == 0


def test_draft_noise_shared_with_acceptance_is_rejected() -> None:
    """A draft is accepted on the very value it was drawn by."""

    def one_purpose(key: KeyUse) -> tuple[int, int]:
        return key.seed, key.position if key.purpose in (Purpose.DRAFT, Purpose.ACCEPT) else -1 - key.position

    of = {"models": [first(SURE)], "max_tokens": SURE + 1, "gamma": 1}
    shared = world(**of, identity=one_purpose, keeps=lambda key: key.purpose is Purpose.DRAFT)
    assert shared.bias() == Fraction(1, 6)
    assert world(**of, keeps=lambda key: True).bias() == 0


def last_draft_counts(x: tuple[int, ...]) -> float:
    """Sure of every draft but for one behind draft 1 at the third of the positions that the first round drafts."""
    return 0.0 if len(x) == SURE + 2 and x[-1] == 1 else 1.0


def without_step(key: KeyUse) -> KeyUse:
    return key._replace(step=0) if key.purpose is Purpose.DRAFT else key


def is_redrafted(key: KeyUse) -> bool:
    """Drafts of the position that the first round drafts as its second one and the next round as its first."""
    return key.purpose is Purpose.DRAFT and key.position == SURE + 1


def test_draft_noise_keyed_by_position_alone_is_rejected() -> None:
    """The budget is from the round before, as it may be; but that round's drafts tell this one's."""
    laws = steady("3/4", "1/2", lead=SURE)
    model = RequestModel(p=laws.p, q=laws.q, confidence=last_draft_counts)
    of: dict[str, Any] = {
        "models": [model],
        "host": lambda: wrong_rules.Lagging({1: 3, 2: 1, 3: 0}),
        "step_ids": (1, 2, 3),
        "max_tokens": SURE + 2,
        "gamma_max": 3,
    }
    assert World(**of, identity=without_step, keeps=is_redrafted).bias() == Fraction(1, 8)
    with pytest.raises(KeyReused):
        World(**of, identity=without_step).bias()
    assert World(**of, keeps=is_redrafted).bias() == 0
    assert World(**of).bias() == 0
