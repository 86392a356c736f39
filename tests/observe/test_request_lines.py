"""The line of a request: what it holds, and what it never holds unless it is asked for."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from fakes.moments import FINISHED, REFUSED, TRACEPARENT

from configs.observability import LogSettings
from runtime.observe.request_lines import LONGEST_TEXT, RequestLines, fields_of, trace_id_of
from runtime.request import Usage


def test_the_line_of_a_finished_request() -> None:
    assert fields_of(FINISHED, "demo", texts=False) == {
        "request_id": "one",
        "identity": "gateway",
        "face": "outrider.v1.InferenceService",
        "model": "demo",
        "code": "OK",
        "end": "length",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "prompt_tokens": 7,
        "completion_tokens": 20,
        "rounds": 8,
        "drafted": 24,
        "admitted": 20,
        "accepted": 12,
        "seed": 2**64 - 1,
        "queue_ms": 250,
        "ttft_ms": 750,
        "decode_ms": 2000,
        "total_ms": 3000,
    }


def test_sequences_that_end_alike_are_told_as_one() -> None:
    alike, apart = replace(FINISHED, n=2, ends=("eos", "eos")), replace(FINISHED, n=2, ends=("eos", "length"))
    assert (fields_of(alike, "", texts=False)["end"], fields_of(alike, "", texts=False)["n"]) == ("eos", 2)
    assert fields_of(apart, "", texts=False)["end"] == "eos,length"


def test_what_it_never_came_to_is_left_out() -> None:
    waited = replace(FINISHED, started_s=None, first_token_s=None, last_token_s=None, usage=Usage(prompt=7))
    times = {name for name in fields_of(waited, "demo", texts=False) if name.endswith("_ms")}
    assert times == {"total_ms"}


def test_what_a_client_sent_is_not_quoted_from_an_error() -> None:
    fields = fields_of(REFUSED, "demo", texts=False)
    assert (fields["code"], fields["field"]) == ("INVALID_ARGUMENT", "stopping.stop")
    assert "secret" not in str(fields)
    assert "secret" in str(fields_of(REFUSED, "demo", texts=True))
    ours = replace(REFUSED, field="", code="UNAVAILABLE", error="a worker was lost")
    assert fields_of(ours, "demo", texts=False)["error"] == "a worker was lost"


@pytest.mark.parametrize("texts", [False, True])
def test_prompts_and_outputs_only_where_asked(texts: bool, caplog: pytest.LogCaptureFixture) -> None:
    lines = RequestLines(LogSettings(texts=texts), "demo")
    with caplog.at_level(logging.INFO, "outrider.requests"):
        lines.write_request(FINISHED, 0)
        lines.spell = lambda ids: "*" * 3 * LONGEST_TEXT if len(ids) == 3 else "short"
        lines.write_request(FINISHED, 0)
    unspelled, spelled = (vars(record) for record in caplog.records)
    if not texts:
        assert not {"prompt", "outputs"} & (unspelled.keys() | spelled.keys())
        return
    assert (unspelled["prompt"], unspelled["outputs"]) == ("1 2 3", ["4 5"])
    assert spelled["outputs"] == ["short"]
    assert spelled["prompt"] == "*" * LONGEST_TEXT + "..."


def test_our_own_failures_are_errors_and_the_rest_is_not(caplog: pytest.LogCaptureFixture) -> None:
    lines = RequestLines(LogSettings(), "demo")
    with caplog.at_level(logging.INFO, "outrider.requests"):
        for record in (FINISHED, REFUSED, replace(FINISHED, code="INTERNAL", ends=("failed",), error="a defect")):
            lines.write_request(record, 0)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "request ended"),
        ("INFO", "request refused"),
        ("ERROR", "request ended"),
    ]


@pytest.mark.parametrize(
    ("given", "trace_id"),
    [
        (TRACEPARENT, TRACEPARENT[3:35]),
        ("", ""),
        ("00-short-b7ad6b7169203331-01", ""),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", ""),
        (f"00-{'Z' * 32}-b7ad6b7169203331-01", ""),
        ("\x1b[31m" * 9, ""),
    ],
)
def test_a_trace_id_is_taken_from_what_is_one(given: str, trace_id: str) -> None:
    assert trace_id_of(given) == trace_id
