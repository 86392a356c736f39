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
from fakes.bench import NO_LIMITS, completion_of, round_of, run_of
from rich.console import Console

from runtime.bench import document
from runtime.bench.counters import ServerCounts
from runtime.bench.document import SCHEMA_VERSION, Report
from runtime.bench.figures import spread
from runtime.bench.load import Closed, Open, Policy
from runtime.bench.machine import cpu_model, machine
from runtime.bench.page import TEMPLATE, page
from runtime.bench.report import build_report, load_name
from runtime.bench.schema import schema_text
from runtime.bench.table import comparison_lines, cost_table, remarks, speed_table

ROOT = Path(__file__).parents[2]
OFF, TWO = Policy(None), Policy(2)
COUNTS = ServerCounts(
    steps=5, emitted=10, drafted_by_position=(4, 4), admitted_by_position=(4, 4), accepted_by_position=(3, 1),
    rank_s=1.0, target_s=0.5, draft_s=0.2, execute_s=1.5, host_s=0.1,
)  # fmt: skip


def report_of(*runs, planned: int | None = None, temperature: float = 0.0) -> Report:
    limits = NO_LIMITS.model_copy(update={"first_token_ms": 10.0})
    plan = document.Plan(
        workload="code", prompts=2, prompt_tokens=spread([3, 5]), prompt_tokens_cut=None, max_tokens=6, ignore_eos=True,
        temperature=temperature, seed=0, policies=["off", "fixed:2"], loads=[load_name(Closed(2))], requests=2,
        warmup=1, repeats=1, limits=limits,
    )  # fmt: skip
    model = document.Model(
        name="<b>demo</b>", model_type="x", num_parameters=1, dtype="float32", numerics="default", vocab_size=9,
        context_length=9, gamma_max=8, dp=1, tp=1, ep=1,
    )  # fmt: skip
    identity = document.Identity(
        model=model, devices=["cpu"], versions={"python": "3"}, machine=machine(), own_server=True, settings={"a": 1}
    )
    return build_report(
        runs,
        plan=plan,
        identity=identity,
        cells_planned=len(runs) if planned is None else planned,
        started_at="2030-01-01T00:00:00+00:00",
        duration_s=3.0,
    )


def streams(*accepted: int, gamma: int = 2, margin: float = 1.0):
    return completion_of([round_of(0, 0), *(round_of(one, gamma, margin=margin) for one in accepted)], at_length=False)


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


def validate(report: Report) -> None:
    schema = json.loads((ROOT / "docs" / "benchmarks" / "bench.schema.json").read_text())
    jsonschema.validators.validator_for(schema).check_schema(schema)
    jsonschema.validate(json.loads(report.model_dump_json()), schema)


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
    assert "failed, 2/s, fixed:2: 1 UNAVAILABLE of 2 requests; latencies and rates lack them" in lines


def test_the_machine_is_named_by_its_cpu(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.00GHz\nmodel name\t: Other\n")
    assert cpu_model(path) == "Some CPU @ 2.00GHz"
    path.write_text("processor\t: 0\n")
    assert cpu_model(path) == cpu_model(tmp_path / "missing") != ""
    assert machine().cores > 0
