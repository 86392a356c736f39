"""The report and its forms: the JSON keeps its schema, the page needs nothing else, the terminal names failures."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
from fakes.bench import completion_of, record_of, round_of, run_of
from fakes.bench_report import COUNTS, OFF, TWO, cells, report_of, streams, validate
from matplotlib.figure import Figure as Canvas
from rich.console import Console

from runtime.bench import document
from runtime.bench.document import SCHEMA_VERSION, Report
from runtime.bench.drafting import Drafts
from runtime.bench.load import Closed, Open, Policy
from runtime.bench.machine import cpu_model, machine
from runtime.bench.page import TEMPLATE, page
from runtime.bench.plots import _acceptance_panel, pictures
from runtime.bench.schema import schema_text
from runtime.bench.table import comparison_lines, cost_table, has_failures, remarks, speed_table
from runtime.cli.bench_files import Outputs, write_files
from runtime.cli.bench_run import fit
from runtime.cli.console import natural_width

ROOT = Path(__file__).parents[2]


def said(*token_streams: tuple[int, ...], policy: Policy, margin: float = 1.0, **options):
    """A cell whose requests said these tokens, a token a pass."""
    completions = [
        replace(completion_of([round_of(0, 0, margin=margin)] * len(tokens), tokens=tokens)) for tokens in token_streams
    ]
    return run_of(*completions, policy=policy, **options)


FULL = report_of(
    run_of(streams(0, 0, 0), streams(0, 0), policy=OFF, counts=COUNTS),
    run_of(streams(2, 1), streams(0, 2), policy=TWO, counts=COUNTS),
    run_of(streams(0, 0), streams(0), policy=OFF, counts=COUNTS, load=Open(2.0)),
    run_of(streams(2, 2), completion_of([], failure="UNAVAILABLE"), policy=TWO, counts=COUNTS, load=Open(2.0)),
)


def test_the_schema_in_the_documents_is_current():
    assert (ROOT / "docs" / "benchmarks" / "bench.schema.json").read_text() == schema_text()


@pytest.mark.parametrize("report", [FULL, report_of(), report_of(run_of(completion_of([], failure="UNKNOWN")))])
def test_every_report_keeps_the_schema_and_reads_back(report):
    validate(report)
    assert Report.model_validate_json(report.model_dump_json()) == report
    assert report.schema_version == SCHEMA_VERSION


def test_a_report_with_an_unknown_key_or_none_at_all_breaks_the_schema():
    broken = FULL.model_dump(mode="json")
    schema = json.loads(schema_text())
    for change in ({"more": 1}, {"groups": None}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**broken, **change}, schema)


def test_groups_take_repeats_together_and_tell_them_apart_by_speed():
    report = report_of(
        run_of(streams(2), policy=TWO, elapsed_s=1.0),
        run_of(streams(2), policy=TWO, elapsed_s=3.0, repeat=1, reads=False),
        planned=9,
    )
    assert not report.complete
    assert len(report.cells) == 2
    [group] = report.groups
    assert group.tokens_per_s_by_repeat == [4.0, pytest.approx(4 / 3)]
    assert group.figures.rates.tokens_per_s == 2.0
    assert group.lengths.accepted_prefixes == [0, 0, 1]


def test_outputs_are_compared_with_the_first_policy_under_the_same_load():
    report = report_of(
        said((1, 2, 3), (4, 5, 6), policy=OFF, margin=1e-5),
        said((1, 2, 3), (4, 9, 6), policy=TWO),
        said((1, 2, 3), (4, 5, 6), policy=OFF, load=Closed(4)),
        said((1, 2, 3), (4, 5), policy=TWO, load=Closed(4)),
    )
    first, second = report.comparisons
    assert (first.compared, first.identical, first.ties) == (2, 1, 1)
    [found] = first.differences
    assert (found.prompt, found.position, found.expected, found.found) == (1, 1, 5, 9)
    assert found.looks_like_a_tie
    assert (second.identical, second.ties) == (1, 0)
    assert second.differences[0].found is None
    assert not second.differences[0].looks_like_a_tie
    lines = comparison_lines(first, "float32")
    assert lines[0].endswith("fixed:2 beside off: 1 of 2 prompts identical; of 1 others 1 look like ties")
    assert "prompt 1, position 1: token 5 became token 9; logit gap 1e-05" in lines[1]


def test_sampled_outputs_and_prompts_sent_twice_are_not_compared():
    runs = [said((1, 2), (3, 4), (8, 8), policy=OFF), said((1, 2), (3, 4), (9, 9), policy=TWO)]
    [comparison] = report_of(*runs).comparisons
    assert (comparison.compared, comparison.identical) == (2, 2)
    assert report_of(*runs, temperature=0.7).comparisons == []


class References(HTMLParser):
    """Whatever a page would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag in ("script", "link", "img", "iframe", "object", "embed", "base", "image"):
            self.found.append(tag)
        for name, value in attrs:
            is_place = name in ("src", "srcset", "href", "xlink:href", "data", "action", "poster")
            if (is_place and not (value or "").startswith("#")) or name.startswith("on"):
                self.found.append(f"{tag} {name}={value}")


@pytest.fixture(scope="module")
def html() -> str:
    return page(FULL)


def test_the_page_needs_nothing_from_elsewhere(html):
    parser = References()
    parser.feed(html)
    assert parser.found == []
    assert re.findall(r"@import|url\((?!#)", html) == []
    # Names of XML vocabularies are no addresses to load from; nothing else has the form of one.
    assert set(re.findall(r"[a-z]+://[^\s\"'<]+", html)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_the_page_holds_all_pictures_and_escapes_names(html):
    assert html.count("<svg") == 7
    assert "&lt;b&gt;demo&lt;/b&gt;" in html
    assert "<b>demo" not in html
    assert "1 UNAVAILABLE" in html
    assert page(FULL) == html


@pytest.mark.parametrize(
    "report", [report_of(planned=3), report_of(run_of(completion_of([], failure="UNKNOWN")), planned=3)]
)
def test_a_page_of_little_says_that_it_ended_early(report):
    html = page(report)
    assert f"Ended early: {len(report.cells)} of 3 cells were measured." in html


def test_the_template_lies_in_the_package():
    assert TEMPLATE.parent == Path(document.__file__).parent
    assert TEMPLATE.is_file()


def test_the_terminal_shows_every_group_and_names_failures_and_limits():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(speed_table(FULL))
    console.print(cost_table(FULL))
    text = console.export_text()
    assert text.count("2 at a time") == 4
    assert text.count("2/s") == 4
    lines = remarks(FULL)
    assert lines[0].startswith("in limits: first token within 10 ms; ")
    assert lines[1].startswith("per pass: over all decode passes; full: tokens per round that verified γ drafts")
    assert len(remarks(report_of(run_of(streams(2))))) == 3
    assert "failed, 2/s, fixed:2: 1 UNAVAILABLE of 2 requests; latencies and rates lack them" in lines


def test_ratios_are_to_the_first_policy_of_the_load_and_to_none_without_its_speed():
    five = streams(0, 0, 0, 0)
    failed = completion_of([], failure="UNAVAILABLE")
    report = report_of(
        run_of(five, policy=OFF, reads=False),
        run_of(five, five, policy=TWO, reads=False),
        run_of(five, policy=OFF, reads=False, load=Closed(4), elapsed_s=5.0),
        run_of(five, five, five, policy=TWO, reads=False, load=Closed(4), elapsed_s=5.0),
        run_of(failed, policy=OFF, reads=False, load=Closed(8)),
        run_of(five, policy=TWO, reads=False, load=Closed(8)),
        run_of(five, policy=Policy(4), reads=False, load=Closed(8)),
    )
    assert cells(speed_table(report), "ratio") == ["1.00", "2.00", "1.00", "3.00", "–", "–", "–"]


def test_the_cost_table_shows_full_rounds_beside_all_passes():
    # Three of γ = 2 in the middle: 3, 1 and 3 tokens; the end of sequence cuts the last to one.
    cut = completion_of([round_of(0, 0), round_of(2, 2), round_of(0, 2), round_of(2, 2, emitted=1)], at_length=False)
    table = cost_table(report_of(run_of(cut, policy=TWO, counts=COUNTS)))
    assert cells(table, "per pass") == ["1.67"]
    assert cells(table, "full") == cells(table, "1+ΣP") == ["2.33"]
    assert "rest" not in [column.header for column in table.columns]


def test_an_average_that_misleads_is_marked_and_explained():
    either = streams(*[0] * 5, *[3] * 5, gamma=3)
    report = report_of(run_of(either, policy=Policy(3)))
    assert report.groups[0].lengths.rate_misleads
    assert cells(cost_table(report), "by α")[0].endswith("!")
    assert any(line.startswith("!: one average acceptance rate α misleads") for line in remarks(report))


def test_what_went_wrong_is_told_by_policy_and_load():
    failed = record_of(replace(completion_of([], failure="INTERNAL"), failure_text="a <defect>"))
    run = replace(
        run_of(streams(2), counts=replace(COUNTS, emitted=9)), readings=(failed,), warmup=(failed,), measured_anew=1
    )
    report = report_of(run, device="cuda:0 (NVIDIA)")
    where = "2 at a time, fixed:2"
    lines = remarks(report)
    assert any(line.startswith(f"failed before, {where}: 2 INTERNAL of the requests") for line in lines)
    assert "  INTERNAL: a <defect>" in lines
    assert f"measured anew, {where}: 1 measurements in which the server lost its ranks count nowhere" in lines
    assert any(line.startswith(f"others, {where}: the server emitted 5 tokens that no request") for line in lines)
    assert any(line.startswith("ranks are on cuda:0 (NVIDIA): draft, verify and state are times of") for line in lines)
    assert has_failures(report)
    assert has_failures(FULL)
    assert not has_failures(report_of(run_of(streams(2))))
    assert "a &lt;defect&gt;" in page(report)


def test_outputs_of_which_some_or_all_failed_are_no_agreement():
    failed, fine = completion_of([], failure="UNAVAILABLE"), streams(0)
    baseline = run_of(fine, fine, policy=OFF)
    [some] = report_of(baseline, run_of(fine, failed)).comparisons
    assert (some.compared, some.identical, some.failed) == (1, 1, 1)
    [line] = comparison_lines(some, "float32")
    assert line.endswith("1 of 1 prompts identical; 1 more failed under one of them and are not compared")
    [none] = report_of(baseline, run_of(failed, failed)).comparisons
    [line] = comparison_lines(none, "float32")
    assert line.endswith("fixed:2 beside off: nothing compared, all 2 prompts failed under one of them")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_a_narrow_terminal_loses_whole_columns_from_the_right_and_no_digit(width):
    for make in (speed_table, cost_table):
        whole = make(FULL)
        table = make(FULL)
        left_out = fit(table, width)
        headings = [column.header for column in whole.columns]
        assert [column.header for column in table.columns] + left_out == headings
        assert len(left_out) < len(headings) - 2
        assert natural_width(table) <= width or len(table.columns) == 3
        console = Console(width=width, file=io.StringIO(), force_terminal=True)
        console.print(table, crop=False)
        shown = console.file.getvalue()
        for column in table.columns:
            assert all(cell in shown for cell in column.cells)
        assert "…" not in shown


def test_the_acceptance_picture_is_of_accepted_drafts():
    axes = Canvas().subplots()
    group = FULL.groups[1]
    assert group.figures.drafts == Drafts(drafted=[4, 4], admitted=[4, 4], accepted=[3, 1])
    _acceptance_panel(axes, [group], {"fixed:2": "C0"})
    [line] = axes.get_lines()
    assert list(line.get_ydata()) == [0.75, 0.25]


def test_many_loads_have_their_panels_in_rows():
    report = report_of(*(run_of(streams(2), counts=COUNTS, load=Closed(n)) for n in range(1, 6)))
    drawn = pictures(report)
    for picture in drawn:
        assert float(re.search(r'viewBox="0 0 (\S+) ', picture.svg)[1]) <= 4 * 3.6 * 72
    [acceptance] = [picture for picture in drawn if picture.title == "Acceptance by position"]
    for n in range(1, 6):
        assert f">{n} at a time<" in acceptance.svg


def test_files_replace_what_was_there_at_once_and_leave_nothing_beside(tmp_path, capsys):
    json_file, html_file = tmp_path / "x.json", tmp_path / "x.html"
    json_file.write_text("old")
    json_file.chmod(0o640)
    assert write_files(FULL, Outputs(json=json_file, html=html_file))
    assert Report.model_validate_json(json_file.read_text()) == FULL
    assert json_file.stat().st_mode & 0o777 == 0o640
    assert "<svg" in html_file.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.html", "x.json"]


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real.json")
    assert write_files(FULL, Outputs(json=tmp_path / "link", html=None))
    assert (tmp_path / "link").is_symlink()
    assert Report.model_validate_json((tmp_path / "real.json").read_text()) == FULL


def test_a_file_that_cannot_be_written_costs_only_itself(tmp_path, capsys):
    html_file, full = tmp_path / "x.html", tmp_path / "full"
    full.symlink_to("/dev/full")
    assert not write_files(FULL, Outputs(json=full, html=html_file))
    assert html_file.exists()
    assert f"--json {full}: No space left on device; it was not written" in capsys.readouterr().err


def test_a_page_that_cannot_be_drawn_costs_only_itself(tmp_path, capsys, monkeypatch):
    def broken(report):
        raise ValueError("no fonts")

    monkeypatch.setattr("runtime.bench.page.pictures", broken)
    html_file = tmp_path / "x.html"
    html_file.write_text("old")
    assert not write_files(FULL, Outputs(json=tmp_path / "x.json", html=html_file))
    assert (tmp_path / "x.json").exists()
    assert html_file.read_text() == "old"
    assert "x.html: ValueError: no fonts; it was not written" in " ".join(capsys.readouterr().err.split())


def test_the_machine_is_named_by_its_cpu(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.00GHz\nmodel name\t: Other\n")
    assert cpu_model(path) == "Some CPU @ 2.00GHz"
    path.write_text("processor\t: 0\n")
    assert cpu_model(path) == cpu_model(tmp_path / "missing") != ""
    assert machine().cores > 0
