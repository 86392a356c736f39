"""Figures of one run and differences between two, from rounds worked out by hand."""

from __future__ import annotations

import pytest

from runtime.bench.comparison import (
    TIE_MARGINS,
    Difference,
    PolicyRun,
    differences,
    first_difference,
    num_compared,
)
from runtime.bench.completion import Completion, Frame
from runtime.cli.demo import comparison_table, difference_lines
from runtime.request import Round


def rounds(*triples: tuple[tuple[int, ...], int, tuple[int, ...]]) -> tuple[Round, ...]:
    return tuple(Round(drafted=drafted, accepted=accepted, emitted=emitted) for drafted, accepted, emitted in triples)


def one_round(tokens: tuple[int, ...]) -> Round:
    """Emits everything at once; the margin of a token is a quarter of its id."""
    return Round(drafted=(), accepted=0, emitted=tokens, margins=tuple(token / 4 for token in tokens))


def completion(tokens: tuple[int, ...], its_rounds: tuple[Round, ...], *, seconds: float = 1.0, failure: str = ""):
    return Completion(
        tokens=tokens,
        rounds=its_rounds,
        num_passes=len(its_rounds),
        sent_s=100.0,
        frames=(Frame(at_s=100.0 + seconds, num_tokens=len(tokens)),),
        failure=failure,
    )


def run_of(*token_streams: tuple[int, ...]) -> PolicyRun:
    return PolicyRun(
        policy="x",
        completions=tuple(
            completion(tokens, (one_round(tokens[:1]), one_round(tokens[1:]))) for tokens in token_streams
        ),
    )


FIRST = completion(
    (1, 2, 3, 4, 5, 6),
    # The prompt's pass, a round with both drafts standing, one with none.
    rounds(((), 0, (1,)), ((2, 3), 2, (2, 3, 4)), ((8, 9), 0, (5,)), ((6,), 1, (6,))),
    seconds=2.0,
)
SECOND = completion((1, 2), rounds(((), 0, (1,)), ((7, 7), 0, (2,))), seconds=2.0)


def test_rates_count_decode_passes_and_only_the_rounds_that_drafted_so_far():
    both = PolicyRun(policy="γ=2", completions=(FIRST, SECOND))
    assert both.tokens_per_s == 8 / 4
    assert both.tokens_per_pass == pytest.approx(6 / 4)
    assert both.acceptance_by_position == pytest.approx((2 / 4, 1 / 3))


def test_without_drafts_a_pass_brings_one_token_and_nothing_is_accepted():
    plain = completion((1, 2, 3), rounds(((), 0, (1,)), ((), 0, (2,)), ((), 0, (3,))))
    off = PolicyRun(policy="off", completions=(plain,))
    assert off.tokens_per_pass == 1.0
    assert off.acceptance_by_position == ()


def test_a_run_that_never_decoded_has_no_tokens_per_pass():
    only_first = completion((1,), rounds(((), 0, (1,))))
    assert PolicyRun(policy="off", completions=(only_first,)).tokens_per_pass is None


def test_equal_streams_have_no_difference():
    assert first_difference(run_of((1, 2), (3,)), run_of((1, 2), (3,))) is None


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (run_of((1, 9, 3), (4,)), Difference(prompt=0, position=1, expected=2, found=9, margin=0.5)),
        (run_of((1, 2, 3), (5,)), Difference(prompt=1, position=0, expected=4, found=5, margin=1.0)),
        (run_of((1, 2), (4,)), Difference(prompt=0, position=2, expected=3, found=None, margin=0.75)),
        (run_of((1, 2, 3), (4, 7)), Difference(prompt=1, position=1, expected=None, found=7, margin=None)),
    ],
)
def test_a_difference_names_prompt_position_both_tokens_and_the_margin_of_the_baseline(other, difference):
    assert first_difference(run_of((1, 2, 3), (4,)), other) == difference


def test_all_differences_are_told_and_what_failed_is_not_compared():
    baseline, other = run_of((1, 2), (3, 4), (5, 6)), run_of((1, 9), (3, 4), (5, 7))
    assert [(found.prompt, found.position) for found in differences(baseline, other)] == [(0, 1), (2, 1)]
    assert num_compared(baseline, other) == 3
    failed = PolicyRun(policy="x", completions=(completion((1,), (), failure="UNAVAILABLE"), *other.completions[1:]))
    assert [found.prompt for found in differences(baseline, failed)] == [2]
    assert num_compared(baseline, failed) == 2
    assert num_compared(failed, baseline) == 2


def difference(*, found: int | None = 9, margin: float | None) -> Difference:
    return Difference(prompt=3, position=17, expected=2, found=found, margin=margin)


@pytest.mark.parametrize("dtype", sorted(TIE_MARGINS))
def test_a_narrow_gap_looks_like_a_tie_and_a_wide_one_like_a_fault(dtype):
    narrow, wide = TIE_MARGINS[dtype] / 2, TIE_MARGINS[dtype] * 2
    assert difference(margin=narrow).explain(dtype) == (
        f"prompt 3, position 17: token 2 became token 9; logit gap {narrow:.2g}: looks like a tie that rounding decided"
    )
    assert difference(margin=wide).explain(dtype).endswith(f"logit gap {wide:.2g}: looks like a fault, not rounding")


def test_a_stream_that_ended_early_is_a_fault_however_narrow_the_gap():
    early = difference(found=None, margin=0.0)
    assert early.explain("float32").endswith("became the end; logit gap 0: looks like a fault, not rounding")


def test_without_a_gap_nothing_speaks_for_a_tie():
    assert difference(margin=None).explain("float32").endswith("no logit gap: looks like a fault, not rounding")


def test_the_demo_says_yes_or_no_in_the_table_and_explains_each_no_below_it():
    runs = [run_of((1, 2)), run_of((1, 2)), run_of((1, 3))]
    *_, verdicts = comparison_table(runs).columns
    assert list(verdicts.cells) == ["baseline", "yes", "no"]
    (line,) = difference_lines(runs, "float32")
    assert line == f"x differs at {first_difference(runs[0], runs[2]).explain('float32')}"


def test_runs_over_different_prompts_are_not_compared():
    with pytest.raises(ValueError):
        first_difference(run_of((1,)), run_of((1,), (2,)))
