"""Spans of requests and steps: their times, names and parents, which are made at all, and a collector that is ill."""

from __future__ import annotations

import builtins
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fakes.collector import collecting
from fakes.engine_house import asynchronous
from fakes.moments import FINISHED, REFUSED, step_record, timings
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from configs.load import SettingsError, load_settings
from configs.observability import TracingSettings
from runtime.observe.observation import Observation, is_sampled
from runtime.observe.traces import Traces
from runtime.request import Origin, Usage

NOBODY = "http://127.0.0.1:1"
END_NS = 2_000_000_000_000_000_000
NO_PARENT = replace(FINISHED, origin=Origin(identity="gateway"))


def spans_of(*records: Any, settings: TracingSettings | None = None) -> list[ReadableSpan]:
    """All spans of some records, in the order in which they ended."""
    exporter = InMemorySpanExporter()
    traces = Traces(settings or TracingSettings(endpoint=NOBODY), model="demo", version="1", exporter=exporter)
    for record in records:
        (traces.write_step if hasattr(record, "plan") else traces.write_request)(record, END_NS)
    traces.close()
    return list(exporter.get_finished_spans())


def seconds(span: ReadableSpan) -> tuple[float, float]:
    """Begin and end, before the request's end."""
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.start_time - END_NS) / 1e9, (span.end_time - END_NS) / 1e9


def test_a_request_is_a_span_with_its_phases_under_the_callers_span() -> None:
    queue, prefill, decode, whole = spans_of(FINISHED)
    assert [span.name for span in (queue, prefill, decode, whole)] == [
        "queue",
        "prefill",
        "decode",
        "text_completion demo",
    ]
    assert seconds(whole) == (-3.0, 0.0)
    assert (seconds(queue), seconds(prefill), seconds(decode)) == ((-3.0, -2.75), (-2.75, -2.25), (-2.25, -0.25))
    assert whole.kind is SpanKind.SERVER
    assert whole.parent is not None
    assert f"{whole.parent.trace_id:032x}-{whole.parent.span_id:016x}" in FINISHED.origin.traceparent
    assert {span.parent.span_id for span in (queue, prefill, decode) if span.parent} == {whole.context.span_id}
    assert {span.context.trace_id for span in (queue, prefill, decode, whole)} == {whole.parent.trace_id}
    assert whole.status.status_code is StatusCode.OK


def test_speculation_and_usage_are_attributes_with_the_names_of_the_conventions() -> None:
    *_, whole = spans_of(FINISHED)
    attributes = dict(whole.attributes or {})
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
    assert {name for name in attributes if name.startswith("gen_ai.")} <= known
    assert attributes["gen_ai.usage.input_tokens"] == 7
    assert attributes["gen_ai.usage.output_tokens"] == 20
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.request.seed"] == str(2**64 - 1)
    assert [attributes[f"outrider.speculation.{name}"] for name in ("drafted", "admitted", "accepted")] == [24, 20, 12]
    assert whole.resource.attributes["service.name"] == "outrider"
    assert not any("prompt" in name or "output.messages" in name for name in attributes)


def test_tracestate_travels_on() -> None:
    *_, whole = spans_of(replace(FINISHED, origin=replace(FINISHED.origin, tracestate="vendor=value")))
    assert whole.context.trace_state.get("vendor") == "value"


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-0", "\x00", "00-" + "f" * 4000])
def test_what_is_no_parent_starts_a_trace_of_its_own(traceparent: str) -> None:
    *_, whole = spans_of(replace(FINISHED, origin=Origin(traceparent=traceparent)))
    assert whole.parent is None


def test_refused_and_failed_requests_are_errors_that_quote_nobody() -> None:
    [refused] = [span for span in spans_of(REFUSED) if span.name != "queue"]
    assert refused.status.status_code is StatusCode.ERROR
    assert refused.attributes is not None
    assert refused.attributes["error.type"] == "INVALID_ARGUMENT"
    assert "secret" not in f"{refused.status.description} {dict(refused.attributes)}"


def test_a_request_that_never_had_a_slot_was_in_the_queue_to_its_end() -> None:
    left = replace(
        FINISHED, started_s=None, first_token_s=None, last_token_s=None, usage=Usage(prompt=7), code="CANCELLED"
    )
    queue, whole = spans_of(left)
    assert seconds(queue) == seconds(whole) == (-3.0, 0.0)


@pytest.mark.parametrize(("flags", "share", "count"), [("01", 0.0, 4), ("00", 1.0, 0)])
def test_the_callers_decision_comes_before_ours(flags: str, share: float, count: int) -> None:
    origin = replace(FINISHED.origin, traceparent=FINISHED.origin.traceparent[:-2] + flags)
    settings = TracingSettings(endpoint=NOBODY, sample=share)
    assert len(spans_of(replace(FINISHED, origin=origin), settings=settings)) == count


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (1.0, 200, 200), (0.5, 60, 140)])
def test_without_one_a_share_is_traced(share: float, low: int, high: int) -> None:
    spans = spans_of(*[NO_PARENT] * 200, settings=TracingSettings(endpoint=NOBODY, sample=share))
    assert low <= sum(span.kind is SpanKind.SERVER for span in spans) <= high


def test_steps_are_traces_of_their_own_whatever_share_of_requests_is_traced() -> None:
    record = step_record(timings(target_s=0.03, verify_s=0.01), step_id=77, known=(4, 1))
    [step] = spans_of(record, settings=TracingSettings(endpoint=NOBODY, sample=0.0))
    assert (step.name, step.parent) == ("step", None)
    assert seconds(step) == (pytest.approx(-record.took_s), 0.0)
    attributes = dict(step.attributes or {})
    assert attributes["outrider.step.id"] == 77
    assert (attributes["outrider.step.rows"], attributes["outrider.step.prompt_rows"]) == (7, 4)
    assert attributes["outrider.step.target_s"] == 0.03


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_which_steps_are_sampled_follows_from_their_number(share: float) -> None:
    chosen = [step for step in range(10_000) if is_sampled(step, share)]
    assert len(chosen) == pytest.approx(10_000 * share, rel=0.02, abs=1)
    assert chosen == [step for step in range(10_000) if is_sampled(step, share)]
    # Evenly: no stretch of the serving goes unseen.
    assert all(later - earlier < 3 / share for earlier, later in pairwise(chosen))


def observation(**changes: object) -> Observation:
    return Observation(load_settings(None, {"logs.requests": False, **changes}))


@asynchronous
async def test_spans_arrive_at_a_collector_over_grpc() -> None:
    with collecting() as collector:
        watching = observation(**{"tracing.endpoint": collector.endpoint, "tracing.step_sample": 1.0})
        watching.note_request(FINISHED)
        watching.note_step(step_record(timings(target_s=0.1), step_id=5))
        await watching.close()
    assert set(collector.spans) == {"queue", "prefill", "decode", "text_completion demo", "step"}
    whole = collector.spans["text_completion demo"]
    assert whole.trace_id.hex() == FINISHED.origin.traceparent[3:35]
    assert whole.parent_span_id.hex() == FINISHED.origin.traceparent[36:52]
    assert whole.end_time_unix_nano - whole.start_time_unix_nano == pytest.approx(3e9, abs=1000)
    assert abs(whole.end_time_unix_nano - time.time_ns()) < 60e9
    numbers = {each.key: each.value.int_value for each in whole.attributes}
    assert numbers["outrider.speculation.accepted"] == 12


@asynchronous
async def test_a_collector_that_hangs_or_is_not_there_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("runtime.observe.observation.CLOSE_TIMEOUT_S", 0.3)
    with collecting() as collector:
        collector.gate.clear()
        for endpoint in (collector.endpoint, NOBODY):
            watching = observation(**{"tracing.endpoint": endpoint})
            began_s = time.monotonic()
            for _ in range(100):
                watching.note_request(FINISHED)
            noted_s = time.monotonic()
            await watching.close()
            assert noted_s - began_s < 0.1
            assert time.monotonic() - noted_s < 3.0
    assert "not written out" in caplog.text


class Flaky(SpanExporter):
    """Fails while `is_down`."""

    def __init__(self) -> None:
        self.is_down = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE if self.is_down else SpanExportResult.SUCCESS


def test_lost_spans_are_mentioned_once_and_their_return_too(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Flaky()
    traces = Traces(TracingSettings(endpoint=NOBODY), model="demo", version="1", exporter=exporter)
    for is_down in (True, True, True, False, False):
        exporter.is_down = is_down
        traces.write_request(NO_PARENT, END_NS)
        traces._processor.force_flush()
    traces.close()
    assert [("again" in message, "do not reach" in message) for message in caplog.messages] == [
        (False, True),
        (True, False),
    ]


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_it(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "runtime.observe.traces")
    monkeypatch.setattr(builtins, "__import__", without_it)
    with pytest.raises(SettingsError, match=r"tracing.endpoint.*pip install 'outrider\[otel\]'"):
        observation(**{"tracing.endpoint": NOBODY})
    observation()  # needs none of it


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://", "http://host", "http://h:x"]
)
def test_what_is_no_address_of_a_collector_is_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError, match=r"tracing.endpoint: give http"):
        load_settings(None, {"tracing.endpoint": endpoint})
