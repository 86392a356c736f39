"""What the host learns of drafts and of time comes near the truth, and stays near the prior while little is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from admission.cliffs import CliffCosts
from hypothesis import given
from hypothesis import strategies as st

from runtime.verification.calibration import FIRST_RATE, REFIT_EVERY, WINDOW, Calibrator, Reached
from runtime.verification.costs import Floats
from runtime.verification.residuals import CorrectedCosts, Residuals
from runtime.verification.survival import DEPTH, MAX_EVIDENCE, SurvivalBook
from workers.plan import IDENTITY, NUM_TEMPERATURE_CLASSES

GAMMA_MAX = 3
CLASS = 3


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def reached(scores: Floats, acceptance: Floats, position: int = 0, *, uncensored: bool = True) -> Reached:
    count = len(scores)
    return Reached(
        classes=np.full(count, CLASS),
        positions=np.full(count, position),
        scores=scores,
        acceptance=acceptance,
        uncensored=np.full(count, uncensored),
    )


def taught(slope: float, offset: float, count: int, *, rounds: int = 1, seed: int = 0) -> Calibrator:
    """Of a drafter whose scores mean σ(slope · score + offset), fitted `rounds` times to `count` samples each."""
    rng, made = np.random.default_rng(seed), Calibrator(GAMMA_MAX)
    for n in range(1, rounds + 1):
        scores = rng.normal(1.0, 2.0, count)
        made.note(reached(scores, sigmoid(slope * scores + offset)), step=n)
        made.refit(n * REFIT_EVERY)
    return made


def fitted(made: Calibrator) -> tuple[float, float]:
    index = CLASS * GAMMA_MAX
    return made.calibration.slopes[index], made.calibration.offsets[index]


@pytest.mark.parametrize(("slope", "offset"), [(0.5, -1.0), (1.0, 0.0), (1.6, 0.8), (0.1, 2.0)])
def test_calibration_finds_what_scores_mean(slope: float, offset: float) -> None:
    """Short of it by the pull of the prior, which a window of samples leaves."""
    made = taught(slope, offset, WINDOW, rounds=12)
    assert fitted(made) == pytest.approx((slope, offset), abs=0.3)
    scores = np.linspace(-3, 5, 40)
    foretold = made.confidence(scores[:, None], np.full(40, CLASS))[:, 0]
    assert np.abs(foretold - sigmoid(slope * scores + offset)).max() < 0.08


def test_a_little_data_moves_calibration_a_little() -> None:
    """From the identity; further with more."""
    far = [abs(fitted(taught(0.3, -2.0, count))[1]) for count in (2, 20, 200)]
    assert far[0] < 0.2 < far[1] < far[2] < 2.0
    assert taught(0.3, -2.0, 0).calibration == IDENTITY


def test_what_one_class_shows_is_a_start_for_the_others() -> None:
    made = taught(0.5, -1.0, WINDOW, rounds=6)
    other = made.calibration.offsets[0]
    assert other == pytest.approx(-1.0, abs=0.4)


def test_the_calibration_error_of_a_calibrated_predictor_is_near_0_and_of_another_one_is_not() -> None:
    rng = np.random.default_rng(1)
    errors = []
    for offset in (0.0, -2.0):
        made = Calibrator(GAMMA_MAX)  # at the identity throughout
        for step in range(20):
            scores = rng.normal(0.5, 1.5, 200)
            made.note(reached(scores, (rng.random(200) < sigmoid(scores + offset)).astype(float)), step=step)
        errors.append(made.errors()[0])
    assert errors[0] < 0.03
    assert errors[1] > 0.2


def test_what_was_learnt_is_kept_and_gone_on_from() -> None:
    made = taught(0.5, -1.0, WINDOW, rounds=4)
    again = Calibrator(GAMMA_MAX)
    again.restore(made.state())
    assert again.state() == made.state()
    assert (again.calibration.slopes, again.calibration.offsets) == (made.calibration.slopes, made.calibration.offsets)
    assert again.rates().tolist() == made.rates().tolist()
    # It was learnt before the first step, so that this one may use it.
    assert again.calibration.version == 0


BAD: dict[str, Callable[[dict[str, object]], object]] = {
    "no_slopes": lambda state: state.pop("slopes"),
    "other_shape": lambda state: state.update(slopes=[[1.0]]),
    "not_finite": lambda state: state.update(offsets=[[math.nan] * GAMMA_MAX] * NUM_TEMPERATURE_CLASSES),
    "falling": lambda state: state.update(slopes=[[-1.0] * GAMMA_MAX] * NUM_TEMPERATURE_CLASSES),
    "beyond_1": lambda state: state.update(stood=[[9.0] * GAMMA_MAX] * NUM_TEMPERATURE_CLASSES),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_what_is_no_calibration_is_refused(spoil: Callable[[dict[str, object]], object]) -> None:
    state = Calibrator(GAMMA_MAX).state()
    spoil(state)
    with pytest.raises(ValueError, match="calibration"):
        Calibrator(GAMMA_MAX).restore(state)


def rounds_under_a_budget(*, counts_censored: bool, seed: int = 2) -> float:
    """The rate learnt of second positions, 0.5 in truth, where budgets leave out those of low confidence in all but
    every eighth round."""
    rng, made = np.random.default_rng(seed), Calibrator(GAMMA_MAX)
    for step in range(4000):
        share = rng.choice((0.1, 0.9))  # of this round's second draft
        is_complete = step % 8 == 0
        if is_complete or share > 0.5:
            score = np.array([math.log(share / (1 - share))])
            made.note(reached(score, np.array([share]), 1, uncensored=is_complete or counts_censored), step=step)
    return float(made.rates()[CLASS, 1])


def test_rates_come_from_rounds_in_which_nothing_was_left_out() -> None:
    assert rounds_under_a_budget(counts_censored=False) == pytest.approx(0.5, abs=0.06)
    assert rounds_under_a_budget(counts_censored=True) > 0.75


def test_rates_start_from_the_prior() -> None:
    assert Calibrator(GAMMA_MAX).rates() == pytest.approx(np.full((NUM_TEMPERATURE_CLASSES, GAMMA_MAX), FIRST_RATE))


@given(st.integers(1, 3), st.integers(0, 2 * DEPTH + 3))
def test_the_book_holds_the_newest_rounds_of_each_sequence(num_sequences: int, num_rounds: int) -> None:
    book = SurvivalBook(GAMMA_MAX, capacity=num_sequences)
    uids = list(range(num_sequences))
    told = [[[(n + uid) % 100 / 100] * GAMMA_MAX for n in range(num_rounds)] for uid in uids]
    for n in range(num_rounds):
        book.note(uids, np.array([told[uid][n] for uid in uids]), [n] * num_sequences)
    prior_RG = np.full((num_sequences, GAMMA_MAX), 0.123)
    survival_EG, of_E, share = book.evidence(uids, prior_RG)
    depth = min(DEPTH, MAX_EVIDENCE // num_sequences)
    assert share * depth == pytest.approx(1)
    for uid in uids:
        newest = told[uid][::-1][:depth]
        assert survival_EG[of_E == uid].tolist() == newest + [[0.123] * GAMMA_MAX] * (depth - len(newest))
        assert book.step_of(uid) == num_rounds - 1


def test_the_book_forgets_whom_it_has_not_heard_of_for_longest() -> None:
    book = SurvivalBook(GAMMA_MAX, capacity=2)
    one = np.full((1, GAMMA_MAX), 0.5)
    for step, uid in enumerate((1, 2, 1, 3)):
        book.note([uid], one, [step])
    assert [book.step_of(uid) for uid in (1, 2, 3)] == [2, -1, 3]
    survival_EG, of_E, _ = book.evidence([2, 3], np.full((2, GAMMA_MAX), 0.9))
    assert set(survival_EG[of_E == 0].ravel()) == {0.9}
    assert survival_EG[of_E == 1][0].tolist() == [0.5] * GAMMA_MAX
    assert len(book) == 2


def note(residuals: Residuals, *, gamma: int, measured_ms: float) -> None:
    residuals.hold(1, num_sequences=4, gamma=gamma, raw_ms=2.0, measured_ms=measured_ms)
    residuals.learn(before=2)


def test_a_time_is_learnt_from_once_no_draft_of_its_step_waits() -> None:
    residuals = Residuals(GAMMA_MAX)
    residuals.hold(7, num_sequences=4, gamma=1, raw_ms=2.0, measured_ms=4.0)
    residuals.hold(8, num_sequences=4, gamma=1, raw_ms=2.0, measured_ms=4.0)
    residuals.learn(before=7)
    assert residuals.factor(4, 1) == 1.0
    residuals.learn(before=8)
    once = residuals.factor(4, 1)
    residuals.learn(before=9)
    assert 1.0 < once < residuals.factor(4, 1)


def told_times(ratio: Callable[[int], float], *, steps: int) -> Residuals:
    """Steps of 4 sequences with γ 0, 1 and 2 in turn, each measured at ratio(γ) times what was predicted."""
    made = Residuals(GAMMA_MAX)
    for n in range(steps):
        gamma = n % 3
        note(made, gamma=gamma, measured_ms=2.0 * ratio(gamma))
    return made


def test_predictions_are_corrected_by_what_was_measured() -> None:
    made = told_times(lambda gamma: 1.5, steps=300)
    assert [made.factor(4, gamma) for gamma in range(3)] == pytest.approx([1.5] * 3, rel=0.03)
    # A length that was not tried, and another load, share what all steps show.
    assert made.factor(4, 3) == pytest.approx(1.5, rel=0.1)
    assert made.factor(64, 1) == pytest.approx(1.5, rel=0.1)
    costs = CorrectedCosts(CliffCosts(by_rows={1: 2.0, 2: 3.0}), made)
    assert costs.at(4, 1.0).step_ms(np.array([1, 2]), waiting=0, gamma=1) == pytest.approx([3.0, 4.5], rel=0.03)
    assert made.problem == ""


def test_one_slow_step_says_little() -> None:
    made = told_times(lambda gamma: 1.0, steps=100)
    note(made, gamma=0, measured_ms=2000.0)
    assert made.factor(4, 0) < 1.1


def test_a_profile_of_another_machine_or_of_other_drafts_is_found_out() -> None:
    assert "times what the profile says" in told_times(lambda gamma: 5.0, steps=1200).problem
    assert told_times(lambda gamma: (1.0, 1.0, 3.0)[gamma], steps=1200).problem


@pytest.mark.parametrize("name", ["slopes", "offsets", "reached"])
def test_a_kept_calibration_with_numbers_beyond_reason_is_refused(name: str) -> None:
    state = Calibrator(GAMMA_MAX).state()
    state[name] = [[1e300] * GAMMA_MAX] * len(state[name])
    fresh = Calibrator(GAMMA_MAX)
    with pytest.raises(ValueError, match="beyond"):
        fresh.restore(state)
    assert fresh.state() == Calibrator(GAMMA_MAX).state()


def first_drafts(
    made: Calibrator, rate: float, rounds: int, *, depth: int = 1, seed: int = 0, per_step: int = 4
) -> None:
    """Rounds of drafts of `depth` positions, each of which stands with `rate` once it is reached."""
    rng = np.random.default_rng(seed)
    for step in range(rounds // per_step):
        for position in range(depth):
            count = per_step if not position else rng.binomial(per_step, rate**position)
            made.note(reached(np.zeros(count), (rng.random(count) < rate).astype(float), position), step=step)


def test_a_change_of_what_stands_is_noticed_in_dozens_of_rounds() -> None:
    made = Calibrator(GAMMA_MAX)
    first_drafts(made, 0.3, 4000, depth=3)
    assert made.rates()[CLASS] == pytest.approx([0.3] * 3, abs=0.1)
    first_drafts(made, 0.9, 80, seed=1)
    rates = made.rates()[CLASS]
    assert rates[0] == pytest.approx(0.9, abs=0.15)
    assert rates[1] > 0.6, "of long drafts of another time nothing is left"


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_chance_makes_nothing_forgotten(rate: float) -> None:
    made = Calibrator(GAMMA_MAX)
    first_drafts(made, rate, 400)
    least = math.inf
    for seed in range(100):
        first_drafts(made, rate, 200, seed=seed)
        least = min(least, made.num_reached)
    assert least > 200


def test_what_is_no_longer_drafted_is_drawn_to_the_position_before() -> None:
    made = Calibrator(GAMMA_MAX)
    first_drafts(made, 0.6, 2000, depth=1)
    made.note(reached(np.zeros(100), np.zeros(100), 1), step=2000)
    assert made.rates()[CLASS, 1] < 0.2
    first_drafts(made, 0.6, 2000, depth=1)
    assert made.rates()[CLASS, 1] == pytest.approx(0.6, abs=0.1)


def test_what_was_not_drafted_goes_by_the_rates_of_the_moment_that_asks() -> None:
    book = SurvivalBook(GAMMA_MAX, capacity=1)
    book.note([7], np.array([[0.5, np.nan, np.nan]]), [1])
    for prior in ([0.8, 0.4, 0.2], [0.8, 0.8, 0.8]):
        survival_EG, _, _ = book.evidence([7], np.array([prior]))
        assert survival_EG[0].tolist() == pytest.approx([0.5, 0.5 * prior[1] / 0.8, 0.5 * prior[2] / 0.8])
        assert survival_EG[1].tolist() == prior
        assert book.mean([7], np.array(prior)).tolist() == pytest.approx(survival_EG[0].tolist())
