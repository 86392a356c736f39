"""What a scrape says keeps to Prometheus's rules of form and of names, by two readers; and the rules bite."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from fakes.a_moment import a_moment
from oracles.exposition import problems_of
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from runtime.front.errors import OutriderError
from runtime.front.refusals import Refusals
from runtime.telemetry import METRICS, EngineCollector

PROMTOOL = shutil.which("promtool")


def text_of(model_name: str = "a model") -> str:
    registry = CollectorRegistry()
    registry.register(EngineCollector(model_name, a_moment))
    return generate_latest(registry).decode()


def without_impossible_sums(problems: list[str]) -> list[str]:
    """No figure stands twice in the moment, so sums are none of its buckets."""
    return [problem for problem in problems if not problem.startswith("the sum of")]


def test_a_scrape_keeps_to_the_rules() -> None:
    assert without_impossible_sums(problems_of(text_of())) == []


@pytest.mark.parametrize("name", ['a "model"', "back\\slash", "line\nbreak", "ü\N{SNOWMAN}", ""])
def test_any_name_of_a_model_can_be_read_back(name: str) -> None:
    text = text_of(name)
    assert without_impossible_sums(problems_of(text)) == []
    for family in text_string_to_metric_families(text):
        assert {sample.labels["model_name"] for sample in family.samples} == {name}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_prometheus_has_no_objection_but_to_names_of_vllm() -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text_of(), capture_output=True, text=True)
    complaints = (done.stdout + done.stderr).splitlines()
    assert [line for line in complaints if not line.startswith("vllm:")] == []


GOOD = """\
# HELP a_b_seconds Times.
# TYPE a_b_seconds histogram
a_b_seconds_bucket{le="1.0"} 1.0
a_b_seconds_bucket{le="+Inf"} 2.0
a_b_seconds_count 2.0
a_b_seconds_sum 5.0
# HELP a_c_total Calls.
# TYPE a_c_total counter
a_c_total{x="1"} 3.0
# HELP a_d_info What.
# TYPE a_d_info gauge
a_d_info{x="1"} 1.0
"""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("", "", None),
        ("# HELP a_c_total Calls.\n", "# HELP a_c_total \n", "no help"),
        ("# TYPE a_c_total counter\n", "", "no known type"),
        ("a_c_total counter", "a_c_total gauge", "end in _total"),
        ("a_c_total", "a_c", "end in _total"),
        ("a_d_info gauge", "a_d_info histogram", "no part of a histogram"),
        ('a_c_total{x="1"} 3.0', 'a_c_total{x="1"} 3.0\na_c_total{x="1"} 4.0', "stands twice"),
        ('a_c_total{x="1"} 3.0', 'a_c_total{x="1"} 3.0\na_c_total{y="1"} 4.0', "different labels"),
        ('a_d_info{x="1"} 1.0', 'a_d_info{x="1"} 2.0', "only tells labels"),
        ('le="1.0"} 1.0', 'le="1.0"} 3.0', "not cumulative"),
        ('le="+Inf"', 'le="7.0"', r"\+Inf"),
        ("count 2.0", "count 3.0", "its last bucket"),
        ("sum 5.0", "sum 0.5", "outside of what its buckets allow"),
        ("sum 5.0", "sum -1.0", "outside of what its buckets allow"),
        ("a_b_seconds", "a_b_ms", "not in seconds"),
        ("a_c_total", "a_counter_total", "names its type"),
        ("a_c_total", "a_C_total", "small letters"),
        ('x="1"} 3', '__x="1"} 3', "labels"),
        ('x="1"} 3', 'x="1} 3', "cannot be read"),
        ("a_c_total{", "other_total{", "stands among"),
        ("Calls.", "Calls", "no sentence"),
    ],
)
def test_the_rules_bite(old: str, new: str, complaint: str | None) -> None:
    problems = problems_of(GOOD.replace(old, new))
    if complaint is None:
        assert problems == []
    else:
        assert re.search(complaint, "\n".join(problems)), problems


def test_labels_have_values_that_settings_and_code_bound() -> None:
    """By name, where values come from; nothing that clients send is among them."""
    bounded = {
        *("version", "python", "grpc", "ray", "torch", "model_type", "dtype", "numerics", "dp", "tp", "ep"),
        *("block_size", "num_gpu_blocks", "dp_rank", "group"),  # the ranks'
        *("position", "length", "gamma"),  # up to gamma_max
        *("files", "result"),  # what settings name
        *("finished_reason", "end", "state", "reason", "part", "policy", "objective", "priority"),  # enumerations
    }
    assert {label for row in METRICS for label in row.labels} == bounded


def test_errors_count_as_what_the_tree_draws() -> None:
    class Novel(OutriderError):
        pass

    class Full(OutriderError.__subclasses__()[0]):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

    refusals = Refusals()
    names = set(refusals.view())
    assert {"InvalidRequest", "Overloaded", "Unauthenticated", "MessageTooLong", "InternalError"} <= names
    assert "Novel" not in names
    assert sum(refusals.view().values()) == 0
    for error in (Novel(), RuntimeError(), Full(), Full()):
        refusals.note(error)
    parent = Full.__bases__[0].__name__
    assert {name: count for name, count in refusals.view().items() if count} == {"InternalError": 2, parent: 2}
    assert set(refusals.view()) == names
