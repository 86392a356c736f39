"""What a report shows of drafting and verification, of policies without one draft length, and of recordings."""

from __future__ import annotations

import re
from dataclasses import replace

import matplotlib
from fakes.bench import AT_A_TIME, run_of
from fakes.bench_report import COUNTS, OFF, cells, report_of, streams, validate

from runtime.bench.canvas import STYLE
from runtime.bench.counters import PlanCounts, PlanMoment
from runtime.bench.load import Bounds, Closed, Policy
from runtime.bench.page import page
from runtime.bench.speed_plots import gamma_pictures, speed_pictures
from runtime.bench.table import cost_table, remarks, work_table

DYNAMIC = Policy(None, Bounds())
PLANS = PlanCounts(
    steps_by_gamma=(1, 0, 3), budget_sum=12, rollback_tokens=3, explored_steps=1,
    predicted_steps=4, predicted_sum_s=0.04, measured_sum_s=0.08, error_sum_s=0.04,
)  # fmt: skip


def planned(*completions, load=AT_A_TIME, repeat=0, fallback="", elapsed_s=5.0):
    moments = tuple(PlanMoment(at_s=i / 10, gamma=i % 3, budget=i, predicted_s=0.01, measured_s=0.02) for i in range(5))
    run = run_of(*completions, policy=DYNAMIC, load=load, repeat=repeat, counts=COUNTS, elapsed_s=elapsed_s)
    return replace(run, plans=PLANS, moments=moments, fallback=fallback)


def test_a_report_of_a_policy_without_one_length_keeps_the_schema_and_compares_outputs():
    report = report_of(run_of(streams(2), policy=OFF, counts=COUNTS), planned(streams(2)))
    validate(report)
    [_, group] = report.groups
    assert (group.policy, group.lengths) == ("dynamic", None)
    assert report.cells[1].series.gamma == [0, 1, 2, 0, 1]
    assert report.cells[1].series.measured_ms == [20.0] * 5
    assert [comparison.identical for comparison in report.comparisons] == [1]
    assert cells(cost_table(report), "1+ΣP")[1] == "–"
    table = work_table(report)
    assert [cells(table, heading)[-1] for heading in ("policy", "γ mean", "K/step", "verified", "stood")] == [
        "dynamic",
        "1.50",
        "3.00",
        "100%",
        "50%",
    ]
    assert [cells(table, heading)[-1] for heading in ("rolled back", "explored", "expected", "was", "off by")] == [
        "3",
        "25%",
        "10.00",
        "20.00",
        "50%",
    ]
    assert "dynamic plans with the profile x.json" in remarks(report)
    assert not any(line.startswith("fell back") for line in remarks(report))


def test_a_dynamic_policy_that_fell_back_is_told():
    report = report_of(planned(streams(2), fallback="the profile is <old>"))
    assert any(
        line.startswith("fell back, 2 at a time, dynamic: ran as a fixed draft length") and line.endswith("is <old>")
        for line in remarks(report)
    )


def test_pictures_show_crossovers_draft_lengths_over_time_and_a_row_per_acceptance():
    few, many = streams(0), streams(0, 0, 0, 0)
    runs = []
    for acceptance in (None, 0.6):
        for load, off, four in ((Closed(1, acceptance), few, many), (Closed(16, acceptance), many, few)):
            runs += [
                run_of(off, policy=OFF, load=load),
                run_of(four, policy=Policy(4), load=load),
                planned(many, load=load, repeat=0),
                planned(many, load=load, repeat=1),
            ]
    report = report_of(*runs)
    with matplotlib.rc_context(STYLE):
        [by_concurrency], [over_time] = speed_pictures(report.groups), gamma_pictures(report.cells)
    speed = by_concurrency.svg
    assert speed.count("beside off") == 2
    # Each name once in each legend, and once over its stretch of each relative panel.
    assert len(re.findall(r">fixed:4<", speed)) == len(re.findall(r">off<", speed)) == 4
    for load in ("1 at a time", "16 at a time", "1 at a time, α=0.6", "16 at a time, α=0.6"):
        assert f">{load}<" in over_time.svg


def test_a_replay_tells_how_outputs_agree_and_its_page_holds_the_verdict(monkeypatch):
    monkeypatch.setattr("runtime.bench.page.pictures", lambda report: [])
    runs = [
        replace(run_of(streams(2), policy=OFF, counts=COUNTS), followed=(4,)),
        replace(planned(streams(2), elapsed_s=20.0), followed=(3,)),
    ]
    report = report_of(*runs, records=True)
    validate(report)
    assert [group.figures.recording.identical for group in report.groups] == [1, 0]
    [line] = [line for line in remarks(report) if line.startswith("apart from the recording")]
    assert line == (
        "apart from the recording, 2 at a time, dynamic: 1 of 1 outputs; 75.0% of all tokens came before they parted"
    )
    [trial] = report.verdict.trials
    assert (trial.best, trial.ratio) == ("off", 0.5)
    html = page(report)
    assert "Dynamic beside the best of the others" in html
    assert '<td class="bad">0.500</td>' in html
    assert "missed, 2 at a time, dynamic: 0.500 of off" in html
    assert report_of(*runs).verdict is None
