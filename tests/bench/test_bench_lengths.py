"""Tokens per pass by counting and by two formulas: exact values, and what holds for all rounds."""

from __future__ import annotations

from fractions import Fraction

import pytest
from fakes.bench import completion_of, round_of
from hypothesis import given
from hypothesis import strategies as st

from runtime.bench.lengths import RoundCounts, count_rounds
from runtime.geometric import geometric_length

FAR = 1000
"""A limit that no round comes near."""


def counts(*prefixes: int) -> RoundCounts:
    return RoundCounts(prefixes=prefixes, near_limit=0, other_length=0, passes=0, tokens=0)


def requests(accepted_by_request, gamma):
    """Requests of a prompt's pass and full rounds, far from their limits."""
    return [
        (completion_of([round_of(0, 0), *(round_of(n, gamma) for n in accepted)], at_length=False), FAR)
        for accepted in accepted_by_request
    ]


def test_the_formulas_of_eight_rounds_by_hand():
    # γ = 2: three rounds with none accepted, one with one, four with both.
    found = counts(3, 1, 4)
    assert found.survival == (Fraction(5, 8), Fraction(4, 8))
    assert found.tokens_per_full_round == Fraction(3 * 1 + 1 * 2 + 4 * 3, 8)
    assert found.expected_by_survival == 1 + Fraction(5, 8) + Fraction(4, 8)
    # Nine accepted; four fell, one in each round that did not accept both.
    assert found.acceptance_rate == Fraction(9, 13)
    alpha = Fraction(9, 13)
    assert found.expected_by_rate == 1 + alpha + alpha**2
    assert found.rate_misleads is (abs(1 + alpha + alpha**2 - Fraction(17, 8)) > Fraction(3, 100) * Fraction(17, 8))


def test_without_drafts_a_pass_brings_one_token_by_all_counts():
    found = counts(5)
    assert (found.tokens_per_full_round, found.expected_by_survival, found.expected_by_rate) == (1, 1, 1)
    assert found.acceptance_rate is None
    assert not found.rate_misleads


def test_without_rounds_there_are_no_figures():
    found = counts(0, 0, 0)
    assert found.tokens_per_pass is None
    assert found.expected_by_survival is None
    assert found.expected_by_rate is None
    assert found.survival == ()


@pytest.mark.parametrize(("prefixes", "misleads"), [((0, 0, 0, 9), False), ((50, 0, 0, 50), True)])
def test_one_rate_misleads_where_text_is_either_easy_or_hard(prefixes, misleads):
    assert counts(*prefixes).rate_misleads is misleads


def test_the_geometric_length_at_its_ends():
    assert geometric_length(Fraction(0), 4) == 1
    assert geometric_length(Fraction(1), 4) == 5
    assert geometric_length(Fraction(1, 2), 3) == Fraction(15, 8)


@given(st.lists(st.lists(st.integers(0, 4), max_size=8), min_size=1, max_size=6))
def test_over_full_rounds_the_first_formula_is_the_tokens_per_pass_exactly(accepted_by_request):
    found = count_rounds(requests(accepted_by_request, 4), 4)
    assert found.full == found.passes == sum(map(len, accepted_by_request))
    assert found.tokens_per_pass == found.tokens_per_full_round == found.expected_by_survival


@given(st.lists(st.integers(0, 100), min_size=2, max_size=9))
def test_the_figures_stay_within_one_and_gamma_plus_one(prefixes):
    found = counts(*prefixes)
    for value in (found.expected_by_survival, found.expected_by_rate):
        assert value is None or 1 <= value <= found.gamma + 1
    assert list(found.survival) == sorted(found.survival, reverse=True)


@given(st.integers(1, 6), st.fractions(0, 1))
def test_the_formulas_agree_where_every_draft_stands_with_one_probability(gamma, alpha):
    alpha = alpha.limit_denominator(9)
    weight = alpha.denominator**gamma
    shares = [alpha**j * (1 - alpha) for j in range(gamma)] + [alpha**gamma]
    found = counts(*(int(share * weight) * alpha.denominator for share in shares))
    if alpha.denominator ** (gamma + 1) == found.full:
        assert found.expected_by_survival == found.expected_by_rate == geometric_length(alpha, gamma)
        assert not found.rate_misleads


def test_rounds_near_the_limit_are_counted_apart_whether_cut_or_not():
    # γ = 2, limit 8: the prompt's pass leaves 7, the next round 4, the one after it 2: fewer than γ + 1.
    for last, emitted in ((round_of(2, 2, emitted=2), 2), (round_of(1, 2), 2)):
        one = completion_of([round_of(0, 0), round_of(2, 2), round_of(1, 2), last])
        assert len(one.tokens) == 6 + emitted
        found = count_rounds([(one, 8)], 2)
        assert (found.prefixes, found.near_limit) == ((0, 1, 1), 1)
        assert (found.passes, found.tokens) == (3, 7)


def test_a_round_that_the_limit_cannot_cut_is_a_full_one():
    # γ = 2: with three tokens left even the longest round is whole.
    one = completion_of([round_of(0, 0), round_of(2, 2)])
    assert len(one.tokens) == 4
    found = count_rounds([(one, 4)], 2)
    assert (found.full, found.near_limit) == (1, 0)


def test_a_context_that_ends_a_request_early_is_its_limit():
    one = completion_of([round_of(0, 0), round_of(2, 2), round_of(2, 2, emitted=1)], at_length=True)
    assert count_rounds([(one, FAR)], 2).near_limit == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=9))
def test_a_round_that_an_end_of_sequence_cut_counts_by_what_was_accepted_before(ends):
    accepted = [accepted for accepted, _ in ends]
    cut = [
        (
            completion_of(
                [round_of(0, 0), round_of(1, 4), round_of(one, 4, emitted=min(kept, one + 1))], at_length=False
            ),
            FAR,
        )
        for one, kept in ends
    ]
    found = count_rounds(cut, 4)
    assert found.full == 2 * len(ends)
    assert found.tokens_per_full_round == found.expected_by_survival
    assert found.tokens_per_full_round == Fraction(sum(one + 1 for one in accepted) + 2 * len(ends), found.full)
    assert found.tokens == sum(2 + min(kept, one + 1) for one, kept in ends)


def test_rounds_of_another_length_are_counted_apart():
    one = completion_of([round_of(0, 0), round_of(0, 1), round_of(1, 2)], at_length=False)
    found = count_rounds([(one, FAR)], 2)
    assert (found.other_length, found.prefixes) == (1, (0, 1, 0))
