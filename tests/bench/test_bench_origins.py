"""What a report shows of predictions, constraints and looking back: drafts by origin, and variants side by side."""

from __future__ import annotations

import matplotlib
import pytest
from fakes.bench import completion_of, round_of, run_of
from fakes.bench_report import COUNTS, OFF, TWO, cells, report_of, validate

from runtime.bench.canvas import STYLE, by_kind
from runtime.bench.counters import DraftCounts
from runtime.bench.document import Report
from runtime.bench.drafting import DraftUse
from runtime.bench.extras import Variant
from runtime.bench.load import Closed
from runtime.bench.origin_table import origin_lines, origin_rows, origin_table
from runtime.bench.page import page
from runtime.bench.speed_plots import speed_pictures

WITH, WITHOUT = Closed(2, None, Variant(brings=True)), Closed(2, None, Variant(brings=False))
USED = DraftCounts(
    drafted=20, admitted=16, accepted=11, predicted_drafted=9, predicted_admitted=8, predicted_accepted=7,
    ngram_drafted=3, ngram_admitted=2, ngram_accepted=1, forbidden=2,
)  # fmt: skip


def answers(*accepted: int, finish: str = "LENGTH", drafts: DraftCounts | None = None, failure: str = ""):
    rounds = [round_of(0, 0), *(round_of(one, 2) for one in accepted)]
    return completion_of(rounds, finish=finish, drafts=drafts, failure=failure)


def both() -> Report:
    """Plain decoding and two drafts, without and with; the prediction brings 3 tokens per pass in place of 1.5."""
    ended = answers(2, 2, finish="CONSTRAINT", drafts=USED)
    return report_of(
        run_of(answers(0, 0, 0), answers(0), policy=OFF, load=WITHOUT, counts=COUNTS),
        run_of(answers(1, 0), answers(0, 1), policy=TWO, load=WITHOUT, counts=COUNTS),
        run_of(answers(0, 0, 0), answers(0), policy=OFF, load=WITH, counts=COUNTS),
        run_of(ended, answers(2, drafts=USED), policy=TWO, load=WITH, counts=COUNTS, elapsed_s=5.0),
        predictions=2,
        edit_every=16,
    )


def test_drafts_are_counted_by_origin_and_ends_by_reason_of_requests_that_finished():
    failed = answers(2, drafts=USED, failure="UNAVAILABLE")
    report = report_of(run_of(answers(2, finish="CONSTRAINT", drafts=USED), answers(1, drafts=USED), failed))
    validate(report)
    [group] = report.groups
    origins = group.figures.origins
    assert origins.drafter == DraftUse(drafted=16, admitted=12, accepted=6)
    assert origins.prediction == DraftUse(drafted=18, admitted=16, accepted=14)
    assert origins.ngram == DraftUse(drafted=6, admitted=4, accepted=2)
    assert origins.forbidden == 4
    assert group.figures.finishes == {"CONSTRAINT": 1, "LENGTH": 1}
    assert report.cells[0].figures.origins == origins


def test_variants_stand_side_by_side_under_each_policy_with_their_ratio():
    report = both()
    validate(report)
    assert Report.model_validate_json(report.model_dump_json()) == report
    rows = origin_rows(report)
    assert [(row.group.policy, row.group.load.variant) for row in rows] == [
        ("off", "without"),
        ("off", "with"),
        ("fixed:2", "without"),
        ("fixed:2", "with"),
    ]
    assert [row.per_pass for row in rows] == [None, 1.0, None, 2.0]
    # 8 tokens in ten seconds, and 11 in five.
    assert [row.speed for row in rows] == [None, 1.0, None, pytest.approx(2.75)]
    table = origin_table(report)
    assert cells(table, "load") == ["2 at a time, without", "2 at a time, with"] * 2
    assert cells(table, "per pass") == ["1.00", "1.00", "1.50", "3.00"]
    assert cells(table, "×")[-1] == "2.00"
    assert cells(table, "drafter")[-1] == "16 / 12 / 6"
    assert cells(table, "prediction") == ["–", "–", "–", "18 / 16 / 14"]
    assert cells(table, "forbidden")[-1] == "4"
    assert cells(table, "ended")[-1] == "1 constraint, 1 length"
    assert any("with an edit every 16 tokens on average" in line for line in origin_lines(report))


def test_a_run_that_sends_prompts_alone_has_no_such_table():
    report = report_of(run_of(answers(1)))
    assert origin_rows(report) == []
    assert origin_table(report).row_count == 0
    assert origin_lines(report) == []
    assert origin_table(report_of(run_of(answers(1)), constraints=2)).row_count == 1


def test_a_variant_whose_other_brought_nothing_has_no_ratio():
    report = report_of(
        run_of(answers(), load=WITHOUT), run_of(answers(1), load=WITH), run_of(answers(1), policy=OFF, load=WITH)
    )
    assert [row.per_pass for row in origin_rows(report)] == [None, None, None]


def test_outputs_are_compared_between_policies_of_a_variant_and_not_across():
    found = [(one.load.variant, one.baseline, one.policy) for one in both().comparisons]
    assert found == [("without", "off", "fixed:2"), ("with", "off", "fixed:2")]


def test_the_page_shows_the_table_and_pictures_tell_variants_apart(monkeypatch):
    report = both()
    assert list(by_kind(report.groups)) == [", without", ", with"]
    with matplotlib.rc_context(STYLE):
        [picture] = speed_pictures(report.groups)
    assert ">tokens per second, without<" in picture.svg
    assert ">beside off, with<" in picture.svg
    monkeypatch.setattr("runtime.bench.page.pictures", lambda report: [])
    html = page(report)
    assert "What requests bring" in html
    assert "<td>18 / 16 / 14</td>" in html
    assert "an edit every 16 tokens on average" in html
