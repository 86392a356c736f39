"""The demo's figures, from rounds worked out by hand."""

from __future__ import annotations

import pytest

from runtime.cli.comparison import Completion, Difference, PolicyRun, first_difference
from runtime.request import Round


def rounds(*triples: tuple[tuple[int, ...], int, tuple[int, ...]]) -> tuple[Round, ...]:
    return tuple(Round(drafted=drafted, accepted=accepted, emitted=emitted) for drafted, accepted, emitted in triples)


def run_of(*token_streams: tuple[int, ...]) -> PolicyRun:
    return PolicyRun(
        policy="x", completions=tuple(Completion(tokens=tokens, rounds=(), seconds=1.0) for tokens in token_streams)
    )


FIRST = Completion(
    tokens=(1, 2, 3, 4, 5, 6),
    # The prompt's pass, a round with both drafts standing, one with none.
    rounds=rounds(((), 0, (1,)), ((2, 3), 2, (2, 3, 4)), ((8, 9), 0, (5,)), ((6,), 1, (6,))),
    seconds=2.0,
)
SECOND = Completion(tokens=(1, 2), rounds=rounds(((), 0, (1,)), ((7, 7), 0, (2,))), seconds=2.0)


def test_rates_count_decode_passes_and_only_the_rounds_that_drafted_so_far():
    both = PolicyRun(policy="γ=2", completions=(FIRST, SECOND))
    assert both.tokens_per_s == 8 / 4
    assert both.tokens_per_pass == pytest.approx(6 / 4)
    assert both.acceptance_by_position == pytest.approx((2 / 4, 1 / 3))


def test_without_drafts_a_pass_brings_one_token_and_nothing_is_accepted():
    plain = Completion(tokens=(1, 2, 3), rounds=rounds(((), 0, (1,)), ((), 0, (2,)), ((), 0, (3,))), seconds=1.0)
    off = PolicyRun(policy="off", completions=(plain,))
    assert off.tokens_per_pass == 1.0
    assert off.acceptance_by_position == ()


def test_a_run_that_never_decoded_has_no_tokens_per_pass():
    only_first = Completion(tokens=(1,), rounds=rounds(((), 0, (1,))), seconds=1.0)
    assert PolicyRun(policy="off", completions=(only_first,)).tokens_per_pass is None


def test_equal_streams_have_no_difference():
    assert first_difference(run_of((1, 2), (3,)), run_of((1, 2), (3,))) is None


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (run_of((1, 9, 3), (4,)), Difference(prompt=0, position=1, expected=2, found=9)),
        (run_of((1, 2, 3), (5,)), Difference(prompt=1, position=0, expected=4, found=5)),
        (run_of((1, 2), (4,)), Difference(prompt=0, position=2, expected=3, found=None)),
        (run_of((1, 2, 3), (4, 7)), Difference(prompt=1, position=1, expected=None, found=7)),
    ],
)
def test_a_difference_names_prompt_position_and_both_tokens(other, difference):
    assert first_difference(run_of((1, 2, 3), (4,)), other) == difference


def test_runs_over_different_prompts_are_not_compared():
    with pytest.raises(ValueError):
        first_difference(run_of((1,)), run_of((1,), (2,)))
