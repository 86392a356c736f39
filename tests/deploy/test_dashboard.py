"""The dashboard: every query asks for what there is, every panel says what it shows, and all of it has a place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from oracles.metric_names import KNOWN, labels_of, problems_of, selectors_of
from oracles.promql import read

from runtime.telemetry import METRICS

FILE = Path(__file__).parents[2] / "deploy" / "observability" / "dashboard.json"
BOARD: dict[str, Any] = json.loads(FILE.read_text())
ROWS = ("Traffic", "Latency", "Speculation", "State and pools", "Steps", "Health and recoveries", "Access")
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
UNITS = {"none", "short", "s", "bytes", "percentunit", "reqps", "ops"}
KINDS = {"timeseries", "stat", "table", "state-timeline"}
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
UNSHOWN = {
    # Told by others that are shown: by sum, by quotient, or one by one.
    *("vllm:cache_config_info", "vllm:kv_cache_usage_perc", "vllm:request_success_total"),
    *("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"),
    *("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"),
    *("vllm:request_inference_time_seconds", "vllm:request_time_per_output_token_seconds", "outrider_policy"),
    *("outrider_requests_submitted_total", "outrider_requests_refused_total", "outrider_accepted_prefix_rounds_total"),
    *("outrider_rank_seconds_total", "outrider_execute_seconds_total", "outrider_host_seconds_total"),
    *("outrider_trimmed_tokens_total", "outrider_calibration_version"),
    # What requests ask for is of use when sizes are chosen, not to an operator.
    *("vllm:request_params_n", "vllm:request_params_max_tokens"),
    # Always 0.
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"),
    # While somebody compares policies, with `outrider policy shadow`.
    *("outrider_shadow_steps", "outrider_shadow_agreed_steps", "outrider_shadow_tokens"),
    "outrider_shadow_step_seconds",
}


def queries() -> Iterator[tuple[str, str, str]]:
    """Where it stands, the query, the legend."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]
    for annotation in BOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"], annotation["textFormat"]


def test_it_has_the_form_that_grafana_takes() -> None:
    assert BOARD["schemaVersion"] >= 39
    assert BOARD["uid"] == "outrider"
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert "id" not in BOARD, "the importing server gives it one"
    assert tuple(panel["title"] for panel in BOARD["panels"] if panel["type"] == "row") == ROWS


def test_panels_have_places_of_their_own() -> None:
    boxes = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(box["x"] >= 0 and box["x"] + box["w"] <= 24 for box in boxes)
    for one, other in combinations(boxes, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or apart
    assert all(one["y"] <= other["y"] for one, other in pairwise(boxes))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows_and_in_what_unit(panel: dict[str, Any]) -> None:
    assert panel["type"] in KINDS
    assert panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    letters = [target["refId"] for target in panel["targets"]]
    assert letters == sorted(set(letters))
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"] in UNITS
    bounds = [step["value"] for step in defaults["thresholds"]["steps"]]
    assert bounds[0] is None
    assert bounds[1:] == sorted(bounds[1:])


@pytest.mark.parametrize(("place", "query", "legend"), list(queries()))
def test_a_query_asks_for_what_there_is(place: str, query: str, legend: str) -> None:
    tree = read(query)
    assert problems_of(tree) == []
    for selector in selectors_of(tree):
        chosen = {label: value for label, sign, value in selector.matchers if sign == "=~"}
        expected = {"job": "$job", "instance": "$instance", "model_name": "$model"}
        assert {label: chosen.get(label) for label in expected if label in KNOWN[selector.name]} == {
            label: value for label, value in expected.items() if label in KNOWN[selector.name]
        }, f"{place}: {selector.name} is of servers that were not chosen"
    assert set(re.findall(r"{{(\w+)}}", legend)) <= labels_of(tree)
    assert set(re.findall(r"\$(\w+)", query)) <= {*VARIABLES, "__rate_interval"}


def test_variables_ask_for_what_there_is() -> None:
    for name, variable in VARIABLES.items():
        if variable["type"] == "query":
            inner, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]).groups()
            tree = read(inner)
            assert problems_of(tree) == [], name
            assert label in labels_of(tree)
            assert variable["query"]["query"] == variable["definition"]
    assert VARIABLES["datasource"]["query"] == "prometheus"


def test_every_metric_is_shown_or_left_out_for_a_reason() -> None:
    names = {selector.name for _, query, _ in queries() for selector in selectors_of(read(query))}
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} | names
    assert {row.name for row in METRICS} - bare == UNSHOWN
