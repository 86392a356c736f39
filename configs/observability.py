"""Settings of what is told of the work: logs and traces. Knows no logger and no exporter."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from configs.base import Settings


class LogSettings(Settings):
    """What is written to standard error."""

    format: Literal["auto", "console", "json"] = Field(
        "auto", description="json: an object per line. auto: console on a terminal, json elsewhere."
    )
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe lines.")
    requests: bool = Field(True, description="One line per request, at its end.")
    texts: bool = Field(
        False, description="Write prompts and outputs into those lines. They may hold what nobody else should read."
    )
    slow_step_ms: float = Field(
        1000.0, gt=0, description="A step that took longer is logged with what took the time; at most one in a second."
    )


class TracingSettings(Settings):
    """OpenTelemetry spans, with the extra `otel` installed."""

    endpoint: str | None = Field(
        None,
        description="OTLP collector over gRPC, as in http://127.0.0.1:4317, or https:// for TLS; unset traces nothing.",
    )
    sample: float = Field(
        1.0, ge=0, le=1, description="Share of requests traced where the caller has not decided it by traceparent."
    )
    step_sample: float = Field(0.01, ge=0, le=1, description="Share of steps that become a span of their own.")

    @field_validator("endpoint")
    @classmethod
    def _is_an_address(cls, given: str | None) -> str | None:
        if given is None:
            return None
        try:
            parts = urlsplit(given)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
        except ValueError:  # no port, or no host
            is_address = False
        if not is_address:
            raise ValueError("give http:// or https://, a host and a port, as in http://127.0.0.1:4317")
        return given
