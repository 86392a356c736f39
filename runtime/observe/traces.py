"""Spans of requests and of sampled steps, to an OpenTelemetry collector over OTLP/gRPC. Imported only where traces are
wanted: it needs the extra `otel`.

    <operation> <model>          submit to end; child of the caller's span where one came with the call
    ├── queue                    submit to slot
    ├── prefill                  slot to first token
    └── decode                   first token to last
    step                         a trace of its own; which steps are sampled follows from their number alone

Names of attributes are those of the semantic conventions for generative AI where these have one; what is ours begins
with `outrider.`. Spans are made at the end of what they are of, by the thread of the scribe, and sent by one of the
exporter's. A collector that cannot be reached is said once; spans wait for it up to the exporter's bounds.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_ON,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TraceState, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes, AttributeValue

from configs.observability import TracingSettings
from runtime.observe.records import OK, RequestRecord, StepRecord
from workers.plan import StepTimings

log = logging.getLogger(__name__)

EXPORT_TIMEOUT_S = 2.0
"""Longest attempt, retries included, to hand a batch of spans to the collector."""

OPERATION = "text_completion"
"""What the conventions call this: a chat's template has been filled in before tokens are asked for."""

_SERVICE = "outrider"
_PARTS = ("target", "verify", "commit", "draft", "collective")


class Traces:
    """A Writer. exporter: tests pass their own."""

    def __init__(
        self, settings: TracingSettings, *, model: str, version: str, exporter: SpanExporter | None = None
    ) -> None:
        assert settings.endpoint is not None, "nothing is traced"
        # What it says of a lost collector, batch by batch, is said once by _Reporting.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._model = model
        exporter = exporter or OTLPSpanExporter(endpoint=settings.endpoint, timeout=EXPORT_TIMEOUT_S)
        self._processor = BatchSpanProcessor(_Reporting(exporter, settings.endpoint))
        provider = TracerProvider(
            sampler=ParentBased(root=_Roots(settings.sample)),
            # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME come before these.
            resource=Resource.create(
                {"service.name": _SERVICE, "service.version": version, "service.instance.id": socket.gethostname()}
            ),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("outrider", version)

    def write_request(self, record: RequestRecord, ended_ns: int) -> None:
        def at(moment_s: float) -> int:
            return ended_ns - round(1e9 * (record.ended_s - moment_s))

        # Of requests that are not sampled nothing is reckoned.
        span = self._tracer.start_span(
            f"{OPERATION} {self._model}",
            context=_parent_of(record),
            kind=SpanKind.SERVER,
            start_time=at(record.submitted_s),
        )
        if span.is_recording():
            span.set_attributes(dict(self._request_attributes(record)))
            if record.code == OK:
                span.set_status(Status(StatusCode.OK))
            else:
                # Of a wrong field the text may quote the client.
                span.set_status(Status(StatusCode.ERROR, record.field or record.error or None))
            inside = set_span_in_context(span, Context())
            for name, since_s, until_s in phases_of(record):
                child = self._tracer.start_span(name, context=inside, start_time=at(since_s))
                child.end(at(until_s))
        span.end(ended_ns)

    def write_step(self, record: StepRecord, ended_ns: int) -> None:
        began_ns = ended_ns - round(1e9 * record.took_s)
        span = self._tracer.start_span("step", context=Context(), start_time=began_ns)
        span.set_attributes(dict(_step_attributes(record)))
        span.end(ended_ns)

    def close(self) -> None:
        """Sends what waits; where the collector cannot be reached that takes as long as the exporter's patience."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _request_attributes(self, record: RequestRecord) -> Iterator[tuple[str, AttributeValue]]:
        asked = {
            "gen_ai.request.max_tokens": record.max_tokens,
            "gen_ai.request.temperature": record.temperature,
            "gen_ai.request.top_p": record.top_p,
            "gen_ai.request.top_k": record.top_k,
            "gen_ai.request.choice.count": record.n if record.n > 1 else None,
        }
        yield "gen_ai.operation.name", OPERATION
        yield "gen_ai.provider.name", _SERVICE
        yield "gen_ai.request.model", self._model
        yield "gen_ai.response.id", record.request_id
        yield from ((name, value) for name, value in asked.items() if value is not None)
        if record.ends:
            yield "gen_ai.response.model", self._model
            yield "gen_ai.response.finish_reasons", record.ends
        if record.code != OK:
            yield "error.type", record.code
        yield "rpc.service", record.origin.face
        yield "enduser.id", record.origin.identity
        yield "outrider.priority", record.priority
        if record.usage is not None:
            usage = record.usage
            yield "gen_ai.request.seed", str(usage.seed)  # an unsigned number of 64 bits, which attributes do not hold
            yield "gen_ai.usage.input_tokens", usage.prompt
            yield "gen_ai.usage.output_tokens", usage.completion
            yield "gen_ai.usage.cache_read.input_tokens", usage.cached
            for name in ("rounds", "drafted", "admitted", "accepted", "trimmed", "forbidden"):
                yield f"outrider.speculation.{name}", getattr(usage, name)


def phases_of(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of each phase that was entered; one that did not end lasts until the request's end."""
    moments = (record.submitted_s, record.started_s, record.first_token_s, record.last_token_s)
    for name, since_s, until_s in zip(("queue", "prefill", "decode"), moments[:-1], moments[1:], strict=True):
        if since_s is not None:
            yield name, since_s, record.ended_s if until_s is None else until_s


def _parent_of(record: RequestRecord) -> Context:
    """Of what is no trace context nothing is taken over."""
    origin = record.origin
    carrier = {"traceparent": origin.traceparent, "tracestate": origin.tracestate}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _step_attributes(record: StepRecord) -> Iterator[tuple[str, AttributeValue]]:
    slowest: StepTimings = record.result.slowest
    yield "outrider.step.id", record.plan.step_id
    yield "outrider.step.epoch", record.plan.epoch
    yield "outrider.step.sequences", record.plan.num_sequences
    yield "outrider.step.rows", record.num_rows
    yield "outrider.step.prompt_rows", record.num_prompt_rows
    yield "outrider.step.gamma", record.plan.gamma
    yield "outrider.step.drafted", record.num_drafted
    yield "outrider.step.admitted", record.num_admitted
    yield "outrider.step.accepted", record.num_accepted
    yield "outrider.step.emitted", record.num_emitted
    yield "outrider.step.planning_s", record.plan_s
    yield "outrider.step.link_s", record.link_s
    yield "outrider.step.booking_s", record.book_s
    for name in _PARTS:
        yield f"outrider.step.{name}_s", getattr(slowest, f"{name}_s")


class _Roots(Sampler):
    """Of what no caller has decided: a share of the requests, and all steps, which were sampled before."""

    def __init__(self, share: float) -> None:
        self._requests = TraceIdRatioBased(share)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        sampler = self._requests if kind is SpanKind.SERVER else ALWAYS_ON
        return sampler.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"Outrider({self._requests.get_description()})"


class _Reporting(SpanExporter):
    """Says in our log when spans begin to be lost, and when they no longer are."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            log.warning("traces do not reach the collector at %s and are dropped; serving goes on", self._endpoint)
        elif self._is_failing and not is_failing:
            log.warning("traces reach the collector at %s again", self._endpoint)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
