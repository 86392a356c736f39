"""Alert rules: they name what there is, say what to do, and fire when they must and only then."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.alert_cases import CASES, MINUTES, Case
from oracles.metric_names import labels_of, problems_of
from oracles.promql import UNITS_S, read
from oracles.promql_value import Recorded, Vector

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "observability" / "alerts.yaml"
GROUPS = yaml.safe_load(FILE.read_text())["groups"]
RULES: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
PROMTOOL = shutil.which("promtool")
FIELDS = {"alert", "expr", "for", "labels", "annotations"}
ADDED_BY_RULES = {"alertname", "severity"}


def seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([smhd])", duration).groups()
    return int(number) * UNITS_S[unit]


def recorded(case: Case) -> Recorded:
    history = Recorded()
    for one in case:
        for minute in range(MINUTES + 1):
            if (value := one.values(minute)) is not None:
                history.add(one.name, one.labels, 60.0 * minute, float(value))
    return history


def fires(rule: dict[str, Any], history: Recorded) -> bool:
    """Whether some series has met the expression for as long as the rule wants, up to the last minute."""
    query, wait_minutes = read(rule["expr"]), int(seconds(rule.get("for", "0s")) // 60)
    held: Vector | None = None
    for minute in range(MINUTES - wait_minutes, MINUTES + 1):
        found = history.at(query, 60.0 * minute)
        assert isinstance(found, dict)
        held = found if held is None else {labels: value for labels, value in found.items() if labels in held}
    return bool(held)


def test_the_file_has_the_form_of_rules():
    assert len({group["name"] for group in GROUPS}) == len(GROUPS)
    assert len(RULES) == sum(len(group["rules"]) for group in GROUPS) >= 12
    for name, rule in RULES.items():
        assert set(rule) <= FIELDS, name
        assert re.fullmatch(r"Outrider([A-Z][a-z]+)+", name)
        assert rule["labels"] == {"severity": rule["labels"]["severity"]}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert seconds(rule.get("for", "0s")) % 60 == 0


@pytest.mark.parametrize("name", RULES)
def test_an_alert_asks_for_metrics_and_labels_that_exist(name: str) -> None:
    rule = RULES[name]
    query = read(rule["expr"])
    assert problems_of(query) == []
    for text in rule["annotations"].values():
        used = set(re.findall(r"\$labels\.(\w+)", text))
        assert used <= labels_of(query) | ADDED_BY_RULES, name


@pytest.mark.parametrize("name", RULES)
def test_an_alert_says_what_it_is_and_where_to_read_on(name: str) -> None:
    annotations = RULES[name]["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert all(annotations.values())
    path, _, anchor = annotations["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    assert anchor == name.lower()
    assert anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


def test_the_documents_list_every_alert() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| \[`(Outrider\w+)`\]\(#(\w+)\) \| (\w+) \|", text, re.MULTILINE)
    assert rows == [(name, name.lower(), rule["labels"]["severity"]) for name, rule in RULES.items()]


@pytest.mark.parametrize("name", RULES)
def test_an_alert_fires_when_it_must_and_only_then(name: str) -> None:
    must, must_not = CASES[name]
    assert must
    assert must_not
    assert [fires(RULES[name], recorded(case)) for case in must] == [True] * len(must)
    assert [fires(RULES[name], recorded(case)) for case in must_not] == [False] * len(must_not)


def test_every_case_is_of_an_alert() -> None:
    assert set(CASES) == set(RULES)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_prometheus_agrees(tmp_path: Path) -> None:
    """Its own rules of form, and its own verdict on every case."""
    assert PROMTOOL is not None
    subprocess.run([PROMTOOL, "check", "rules", FILE], check=True, capture_output=True)
    tests = [
        {
            "name": f"{name} {'fires' if is_firing else 'is quiet'} {number}",
            "interval": "1m",
            "input_series": [
                {
                    "series": one.name + "{" + ", ".join(f'{key}="{value}"' for key, value in one.labels.items()) + "}",
                    "values": " ".join(
                        "_" if (value := one.values(minute)) is None else str(float(value))
                        for minute in range(MINUTES + 1)
                    ),
                }
                for one in case
            ],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) > 0',
                    "eval_time": f"{MINUTES}m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if is_firing else [],
                }
            ],
        }
        for name, verdicts in CASES.items()
        for is_firing, cases in zip((True, False), verdicts, strict=True)
        for number, case in enumerate(cases)
    ]
    document = {"rule_files": [str(FILE)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(document))
    done = subprocess.run([PROMTOOL, "test", "rules", tmp_path / "cases.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
