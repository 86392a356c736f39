"""One line per request, at its end. Knows no format: fields go to the logger, and the pipeline of `logs` renders them.

Prompts and outputs are written only where the settings say so, and then only as far as LONGEST_TEXT. What an error says
of a wrong field may quote the client too, and keeps to the same rule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from configs.observability import LogSettings
from runtime.front.errors import InternalError
from runtime.observe.records import RequestRecord, StepRecord
from runtime.request import Usage

REQUESTS = logging.getLogger("outrider.requests")

LONGEST_TEXT = 10_000
"""Characters of a prompt, or of an output, that a line holds; the rest is cut."""

LONGEST_ERROR = 1000
"""Characters of an error, which may quote a client at length."""

Spell = Callable[[Sequence[int]], str]
"""From token ids to text."""

_SPECULATION = ("rounds", "drafted", "admitted", "accepted", "trimmed", "forbidden")
"""Counts of usage that speculation makes."""


class RequestLines:
    """A Writer. spell: for texts; unset as long as there is no tokenizer, and then token ids are written."""

    def __init__(self, settings: LogSettings, model: str) -> None:
        self._settings = settings
        self._model = model
        self.spell: Spell | None = None

    def write_request(self, record: RequestRecord, ended_ns: int) -> None:
        level = logging.ERROR if record.code == InternalError.code else logging.INFO
        if REQUESTS.isEnabledFor(level):
            fields = fields_of(record, self._model, texts=self._settings.texts)
            if self._settings.texts:
                fields |= self._texts(record)
            REQUESTS.log(level, "request ended" if record.ends else "request refused", extra=fields)

    def write_step(self, record: StepRecord, ended_ns: int) -> None:
        """Steps have no lines here."""

    def close(self) -> None:
        """Lines are written by the pipeline, which outlives this."""

    def _texts(self, record: RequestRecord) -> dict[str, Any]:
        if not record.prompt:
            return {}
        return {"prompt": self._text(record.prompt), "outputs": [self._text(output) for output in record.outputs]}

    def _text(self, token_ids: Sequence[int]) -> str:
        text = self.spell(token_ids) if self.spell is not None else " ".join(map(str, token_ids))
        return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."


def fields_of(record: RequestRecord, model: str, *, texts: bool) -> dict[str, Any]:
    """What the line tells, in order; times in milliseconds. Leaves out what is not known, and counts that are 0 where
    that goes without saying."""
    origin = record.origin
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "identity": origin.identity,
        "face": origin.face,
        "model": model,
        "code": record.code,
        "end": _all_of(record.ends),
        "field": record.field,
        "error": record.error[:LONGEST_ERROR] if texts or not record.field else "",
        "trace_id": trace_id_of(origin.traceparent),
    }
    fields = {name: value for name, value in fields.items() if value}
    if record.usage is not None:
        fields |= _counts(record, record.usage)
    return fields | _times(record)


def _counts(record: RequestRecord, usage: Usage) -> dict[str, Any]:
    counts = {"n": record.n} if record.n > 1 else {}
    counts |= {"priority": record.priority} if record.priority else {}
    counts |= {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion}
    counts |= {"cached_tokens": usage.cached} if usage.cached else {}
    counts |= {name: getattr(usage, name) for name in _SPECULATION if getattr(usage, name)}
    return counts | {"seed": usage.seed}


def _times(record: RequestRecord) -> dict[str, float]:
    """queue: to the first slot; ttft: to the first token, from the same moment; decode: from there to the last."""
    begin = record.submitted_s
    times = {
        "queue_ms": _ms(begin, record.started_s),
        "ttft_ms": _ms(begin, record.first_token_s),
        "decode_ms": _ms(record.first_token_s, record.last_token_s),
        "total_ms": _ms(begin, record.ended_s),
    }
    return {name: value for name, value in times.items() if value is not None}


def _ms(since_s: float | None, until_s: float | None) -> float | None:
    return None if since_s is None or until_s is None else round(1000 * (until_s - since_s), 3)


def _all_of(ends: Iterable[str]) -> str:
    """One where all are the same, else each, in order."""
    listed = list(ends)
    return listed[0] if len(set(listed)) == 1 else ",".join(listed)


def trace_id_of(traceparent: str) -> str:
    """Of the caller's trace (W3C trace context, version 00); "" where it is none."""
    parts = traceparent.split("-")
    if len(parts) < 4 or len(parts[1]) != 32 or not set(parts[1]) <= set("0123456789abcdef") or not parts[1].strip("0"):
        return ""
    return parts[1]
