"""The verdict on a dynamic policy: ratios by repeat, bounds, and what is said of misses."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from fakes.bench import completion_of, round_of, run_of

from runtime.bench.counters import PlanCounts
from runtime.bench.document import Limits, Verdict
from runtime.bench.figures import CellRun
from runtime.bench.load import Bounds, Closed, Load, Open, Policy
from runtime.bench.report import cells_of, groups_of
from runtime.bench.verdict import lower_bound, verdict_of
from runtime.bench.verdict_table import verdict_lines, verdict_table

DYNAMIC = Policy(None, Bounds())
LIMITS = Limits(first_token_ms=None, token_gap_ms=None, request_ms=None)
TOKENS = 100.0


def runs_of(speeds: dict[Load, dict[Policy, list[float]]], **changes: object) -> list[CellRun]:
    """Cells whose repeats have these speeds. changes: of each run."""
    completion = completion_of([round_of(0, 0)] * int(TOKENS))
    return [
        replace(run_of(completion, policy=policy, load=load, repeat=repeat, elapsed_s=TOKENS / speed), **changes)
        for load, by_policy in speeds.items()
        for policy, values in by_policy.items()
        for repeat, speed in enumerate(values)
    ]


def judged(runs: list[CellRun]) -> Verdict | None:
    return verdict_of(groups_of(runs, LIMITS), cells_of(runs, LIMITS))


def found(speeds: dict[Load, dict[Policy, list[float]]], **changes: object) -> Verdict:
    verdict = judged(runs_of(speeds, **changes))
    assert verdict is not None
    return verdict


def test_dynamic_is_held_against_the_best_by_median_repeat_by_repeat():
    [trial] = found(
        {
            Closed(4): {
                Policy(None): [90, 80, 300],  # the fastest once, and not by its median
                Policy(2): [100, 110, 120],
                Policy(5): [50, 60, 70],
                DYNAMIC: [100, 99, 132],
            }
        }
    ).trials
    assert trial.best == "fixed:2"
    assert trial.ratios == pytest.approx([1.0, 0.9, 1.1])
    assert trial.ratio == pytest.approx(1.0)
    assert trial.bound == pytest.approx(0.9)
    assert trial.longest_loses
    assert trial.ahead_of_longest


def test_a_bound_is_below_the_median_and_above_the_least_and_the_same_every_time():
    ratios = [0.97, 0.99, 1.0, 1.01, 1.03, 0.98, 1.02]
    assert min(ratios) <= lower_bound(ratios) < median(ratios)
    assert lower_bound(ratios) == lower_bound(ratios)
    assert lower_bound([0.5]) == 0.5
    assert lower_bound([x * 2 for x in ratios]) == pytest.approx(2 * lower_bound(ratios))


def test_the_aims_are_a_floor_everywhere_and_nearness_in_most_loads():
    def at(ratio: float) -> dict[Policy, list[float]]:
        return {Policy(None): [100.0] * 3, DYNAMIC: [100 * ratio] * 3}

    good = found({Closed(n): at(1.0 if n > 1 else 0.96) for n in range(1, 11)})
    assert (good.floor_is_kept, good.most_are_near) == (True, True)
    assert (good.share_near, good.least_bound) == (0.9, pytest.approx(0.96))
    low = found({Closed(n): at(1.0 if n > 1 else 0.94) for n in range(1, 11)})
    assert (low.floor_is_kept, low.most_are_near) == (False, True)
    few = found({Closed(n): at(1.0 if n > 2 else 0.96) for n in range(1, 11)})
    assert (few.floor_is_kept, few.most_are_near) == (True, False)


def test_where_the_longest_drafts_lose_dynamic_is_to_be_ahead_of_them():
    def at(off: float, five: float, dynamic: float) -> dict[Policy, list[float]]:
        return {Policy(None): [off], Policy(1): [1.0], Policy(5): [five], DYNAMIC: [dynamic]}

    verdict = found({Closed(1): at(2, 3, 2.5), Closed(2): at(3, 2, 2.5), Closed(4): at(3, 2, 1.5)})
    assert [(trial.longest_loses, trial.ahead_of_longest) for trial in verdict.trials] == [
        (False, False),
        (True, True),
        (True, False),
    ]
    assert (verdict.longest_lost, verdict.ahead_where_longest_lost) == (2, 1)


def test_each_acceptance_is_a_trial_and_open_loops_and_lone_policies_are_none():
    speeds = {Policy(None): [100.0], DYNAMIC: [90.0]}
    verdict = found({Closed(4): speeds, Closed(4, 0.3): speeds, Open(2.0): speeds, Closed(8): {DYNAMIC: [9.0]}})
    assert [trial.load.acceptance for trial in verdict.trials] == [None, 0.3]
    assert judged(runs_of({Closed(4): {Policy(None): [1.0], Policy(2): [1.0]}})) is None
    assert judged(runs_of({Open(4.0): speeds})) is None
    # An early end leaves repeats that one of them lacks.
    [trial] = found({Closed(4): {Policy(None): [100.0, 100.0], DYNAMIC: [90.0]}}).trials
    assert trial.ratios == pytest.approx([0.9])


def test_a_miss_is_told_with_the_figures_that_speak_for_its_cause():
    plans = PlanCounts(
        steps_by_gamma=(5, 0, 15), explored_steps=2, predicted_steps=10, predicted_sum_s=0.1, measured_sum_s=0.12
    )
    speeds = {Policy(None): [100.0, 100.0], Policy(5): [99.0, 99.0], DYNAMIC: [90.0, 92.0]}
    verdict = found({Closed(4, 0.6): speeds, Closed(8): {Policy(None): [1.0], DYNAMIC: [1.0]}}, plans=plans)
    summary, longest, *missed = verdict_lines(verdict)
    assert "bound of its ratio to the best other policy is 0.900 or more, which misses 0.95 everywhere" in summary
    assert "0.98 or more in 50% of them, which misses nine of ten" in summary
    assert longest.endswith("(1 loads), dynamic is faster than they are in 0")
    [line] = missed
    assert line.startswith(
        "  missed, 4 at a time, α=0.6, dynamic: 0.910 of off, bound 0.900 (0.900–0.920 in 2 repeats)"
    )
    for part in (
        "slower than the longest fixed drafts, which lose to off",
        "γ 1.50 on average",
        "1.00 tokens per pass against 1.00",
        "a step took 12.00 ms, 20% over expectation",
        "10.0% of its steps explored",
    ):
        assert part in line
    assert verdict_table(verdict).row_count == 2
    assert verdict_table(None).row_count == 0
    assert verdict_lines(None) == []


def test_speeds_are_paired_by_the_repeat_that_they_are_of_and_not_by_their_order():
    runs = runs_of({Closed(4): {Policy(None): [100.0, 50.0, 80.0], DYNAMIC: [90.0, 45.0, 72.0]}})
    runs.append(runs.pop(3))  # put off until all others were done
    verdict = judged(runs)
    assert verdict.trials[0].ratios == pytest.approx([0.9] * 3)
    del runs[1]
    assert judged(runs).trials[0].ratios == pytest.approx([0.9] * 2)
