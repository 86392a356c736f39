"""Looking up what a step costs: right where it was measured, sane between and beyond, and quick."""

from __future__ import annotations

import time

import numpy as np
import pytest
from fakes import profiles
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.profile.document import Cell, Profile
from runtime.profile.smoothing import monotone
from runtime.verification.costs import CostCurve, StepCosts
from runtime.verification.profile import ProfileCosts


def ms(curve: CostCurve, rows: int, waiting: int, gamma: int) -> float:
    return float(curve.step_ms(np.array([rows]), waiting=waiting, gamma=gamma)[0])


def expected(load: int, context: float, waiting: int, gamma: int, rows: int) -> float:
    """By the linear formula, drafts that wait and drafts drawn apart."""
    return profiles.linear(load, context, waiting, rows)[0] + profiles.linear(load, context, gamma, rows)[1]


@pytest.fixture(scope="module")
def linear() -> ProfileCosts:
    return ProfileCosts(profiles.profile(profiles.grid()))


def test_what_was_measured_is_what_is_said(linear):
    for cell in profiles.grid():
        found = ms(linear.at(cell.num_sequences, cell.context), cell.rows, cell.waiting, cell.gamma)
        assert found == pytest.approx(cell.step.median, abs=1e-9)


@pytest.mark.parametrize(
    ("load", "context", "waiting", "gamma", "rows"),
    [
        pytest.param(3, 64, 2, 2, 7, id="a load between two"),
        pytest.param(4, 300, 8, 8, 36, id="a context between two"),
        pytest.param(4, 900, 0, 0, 4, id="a longer context"),
        pytest.param(8, 512, 8, 8, 72, id="a long context of a load that only had short ones"),
        pytest.param(4, 64, 2, 5, 12, id="another number drawn than waited"),
        pytest.param(4, 64, 6, 7, 20, id="draft lengths between measured ones"),
        pytest.param(4, 64, 0, 0, 500, id="rows of prompts"),
        pytest.param(1, 64, 8, 8, 300, id="rows of prompts beside drafts"),
        pytest.param(12, 64, 3, 3, 48, id="more sequences than were measured"),
    ],
)
def test_a_cost_without_corners_is_met_everywhere(linear, load, context, waiting, gamma, rows):
    found = ms(linear.at(load, context), rows, waiting, gamma)
    assert found == pytest.approx(expected(load, context, waiting, gamma, rows), rel=1e-6)


def test_greedy_steps_have_a_price_of_their_own():
    greedy = profiles.grid(lambda *at: tuple(part / 2 for part in profiles.linear(*at)), contexts=(64,), sampled=False)
    costs = ProfileCosts(profiles.profile([*profiles.grid(), *greedy]))
    assert ms(costs.at(4, 64, sampled=False), 20, 4, 4) == pytest.approx(expected(4, 64, 4, 4, 20) / 2)
    assert ms(costs.at(4, 64), 20, 4, 4) == pytest.approx(expected(4, 64, 4, 4, 20))
    # Longer contexts were measured of sampled ones alone, and add as much here.
    more = ms(costs.at(4, 512, sampled=False), 20, 4, 4) - ms(costs.at(4, 64, sampled=False), 20, 4, 4)
    assert more == pytest.approx(expected(4, 512, 4, 4, 20) - expected(4, 64, 4, 4, 20))


def test_one_kind_that_was_measured_goes_for_both(linear):
    assert ms(linear.at(2, 64, sampled=False), 6, 2, 2) == ms(linear.at(2, 64), 6, 2, 2)


def test_rows_are_priced_as_the_tier_they_are_padded_to():
    def steps(load: int, context: float, drafts: int, rows: int) -> tuple[float, float]:
        return profiles.linear(load, context, drafts, -(-rows // 32) * 32)

    costs = ProfileCosts(profiles.profile(profiles.grid(steps), tiers=tuple(range(32, 513, 32))))
    assert costs.tiers[0] == 32
    curve = costs.at(8, 64)
    assert [ms(curve, rows, 8, 8) for rows in (9, 20, 32)] == [ms(curve, 32, 8, 8)] * 3
    assert ms(curve, 33, 8, 8) == ms(curve, 64, 8, 8) == pytest.approx(sum(steps(8, 64, 8, 64)))


def test_rows_that_were_not_measured_cost_what_they_do_at_larger_loads():
    def bent(load: int, context: float, drafts: int, rows: int) -> tuple[float, float]:
        return 10 + min(rows, 9) + 0.1 * max(0, rows - 9), 0.0

    costs = ProfileCosts(profiles.profile(profiles.grid(bent, loads=(1, 10))))
    assert ms(costs.at(1, 64), 9, 8, 8) == pytest.approx(19)
    assert ms(costs.at(1, 64), 49, 8, 8) == pytest.approx(19 + 4)
    assert ms(costs.at(1, 64), 1009, 0, 0) - ms(costs.at(1, 64), 9, 0, 0) == pytest.approx(100)


def test_without_a_drafter_rows_cost_no_drafting():
    def greedy_drafter(load: int, context: float, drafts: int, rows: int) -> tuple[float, float]:
        return 5.0, 1.0 * rows * (drafts > 0) + drafts

    costs = ProfileCosts(profiles.profile(profiles.grid(greedy_drafter)))
    assert ms(costs.at(4, 64), 500, 0, 0) == pytest.approx(5)
    assert ms(costs.at(4, 64), 500, 0, 2) == pytest.approx(5 + 500 + 2)


def test_drafts_beyond_the_longest_measured_go_on_and_never_fall():
    cells = [
        profiles.cell(2, 64, drafts, rows, (price, float(drafts)))
        for drafts, rows, price in ((0, 2, 9), (1, 2, 10), (1, 4, 20), (2, 2, 20), (2, 6, 21), (3, 2, 15), (3, 8, 16))
    ]
    rising = ProfileCosts(profiles.profile(cells[:5])).at(2, 64)
    assert ms(rising, 2, 8, 8) == pytest.approx(20 + 6 * 10 + 8)
    assert np.diff(rising.step_ms(np.arange(2, 30), waiting=8, gamma=8)).min() >= 0
    falling = ProfileCosts(profiles.profile(cells)).at(2, 64)
    assert ms(falling, 8, 8, 0) == pytest.approx(16)


def test_a_load_that_was_measured_alone_still_prices_others():
    costs = ProfileCosts(profiles.profile(profiles.grid(loads=(4,))))
    few, same, many = (ms(costs.at(load, 64), 40, 4, 4) for load in (1, 4, 64))
    assert few > 0
    assert same == pytest.approx(expected(4, 64, 4, 4, 40))
    assert ms(costs.at(8, 64), 40, 4, 4) <= many < np.inf
    more = [ms(costs.at(load, 512), 40, 4, 4) - ms(costs.at(load, 64), 40, 4, 4) for load in (4, 8)]
    assert more[1] == pytest.approx(2 * more[0])


def test_a_single_cell_is_a_profile():
    costs = ProfileCosts(profiles.profile([profiles.cell(1, 64, 0, 1, (5.0, 0.0))], gamma_max=0))
    assert ms(costs.at(3, 1000), 17, 0, 0) == pytest.approx(5.0)


def test_fewer_sequences_than_were_measured_cost_what_those_cost():
    costs = ProfileCosts(profiles.profile(profiles.grid(loads=(4, 8))))
    assert ms(costs.at(1, 64), 3, 2, 2) == pytest.approx(ms(costs.at(4, 64), 12, 2, 2))


def test_it_is_quick(linear):
    rows = np.arange(16, 516)
    linear.at(8, 64).step_ms(rows, waiting=4, gamma=4)

    def least_us(call) -> float:
        took = []
        for _ in range(50):
            began = time.perf_counter()
            call()
            took.append(time.perf_counter() - began)
        return 1e6 * min(took)

    curve = linear.at(8, 64)
    assert least_us(lambda: linear.at(8, 300)) < 100
    assert least_us(lambda: curve.step_ms(rows, waiting=4, gamma=4)) < 30


def test_it_is_what_planning_asks_for(linear):
    costs: StepCosts = linear
    assert (costs.gamma_max, costs.tiers) == (8, ())


def test_a_fall_within_the_noise_is_raised():
    assert monotone(np.array([5.0, 4.0, 6.0]), np.array([0.5, 0.5, 0.5])).tolist() == [5, 5, 6]


def test_a_fall_beyond_the_noise_lowers_what_came_before():
    assert monotone(np.array([4.0, 9.0, 5.0, 6.0]), np.array([0.5, 0.5, 0.5, 0.5])).tolist() == [4, 5, 5, 6]


@pytest.mark.parametrize("iqr", [(0.1, 2.0), (2.0, 0.1)])
def test_a_fall_is_as_noisy_as_the_noisier_end(iqr):
    assert monotone(np.array([9.0, 5.0]), np.array(iqr)).tolist() == [9, 9]


def test_a_cheaper_size_is_padded_up_to():
    cells = [cell for cell in profiles.grid(loads=(1, 8)) if (cell.num_sequences, cell.waiting) != (8, 8)]
    cells += [profiles.cell(8, 64, 8, rows, (price, 9.0)) for rows, price in ((8, 10), (30, 25), (50, 15), (72, 30))]
    curve = ProfileCosts(profiles.profile(cells)).at(8, 64)
    assert [ms(curve, rows, 8, 8) - ms(curve, 8, 8, 8) for rows in (30, 50, 72)] == pytest.approx([5, 5, 20])


@st.composite
def noisy_profiles(draw) -> Profile:
    """Grids with holes, of whatever prices."""
    loads = draw(st.lists(st.sampled_from([1, 2, 4, 7, 64]), min_size=1, max_size=3, unique=True))
    gamma_max = draw(st.integers(0, 8))
    lengths = sorted({0, *draw(st.lists(st.integers(0, gamma_max), max_size=3))})
    price = st.tuples(st.floats(0.001, 100), st.floats(0, 100))
    cells: list[Cell] = []
    for load in loads:
        for drafts in lengths:
            for budget in sorted({0, load * drafts, *draw(st.lists(st.integers(0, load * drafts), max_size=2))}):
                ms = draw(price)
                cells.append(profiles.cell(load, 64, drafts, load + budget, ms, iqr=draw(st.floats(0, 5))))
        if draw(st.booleans()):
            context = draw(st.sampled_from([300.0, 1000.0]))
            cells.append(profiles.cell(load, context, lengths[-1], load * (1 + lengths[-1]), draw(price)))
    tiers = draw(st.sampled_from([(), (32, 64, 96), (8, 600)]))
    return profiles.profile(cells, tiers=tiers, gamma_max=gamma_max)


@settings(max_examples=40, deadline=None)
@given(noisy_profiles(), st.data())
def test_costs_are_finite_and_never_fall_with_rows(profile, data):
    costs = ProfileCosts(profile)
    load = data.draw(st.integers(1, 5000))
    curve = costs.at(load, data.draw(st.floats(0, 1e6)), sampled=data.draw(st.booleans()))
    rows = np.array(sorted(data.draw(st.lists(st.integers(1, 100_000), min_size=1, max_size=20))))
    found = curve.step_ms(rows, waiting=data.draw(st.integers(0, 9)), gamma=data.draw(st.integers(0, 9)))
    assert found.shape == rows.shape
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert (np.diff(found) >= -1e-6 * found[1:]).all()


@settings(max_examples=30, deadline=None)
@given(noisy_profiles())
def test_longer_contexts_and_further_drafts_never_make_a_step_cheaper(profile):
    costs = ProfileCosts(profile)
    load = profile.cells[0].num_sequences
    contexts = [ms(costs.at(load, context), load, 0, 0) for context in (1, 64, 200, 500, 2000, 50_000)]
    assert (np.diff(contexts) >= -1e-6).all()
    drafts = [ms(costs.at(load, 64), load, 0, gamma) for gamma in range(profile.identity.gamma_max + 1)]
    assert (np.diff(drafts) >= -1e-6).all()
