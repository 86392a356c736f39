"""What a server's settings have noted of its work: lines of requests and slow steps, and traces. Knows no engine."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from configs.load import SettingsError
from configs.schema import ServeSettings
from runtime.observe.records import RequestRecord, StepRecord
from runtime.observe.request_lines import RequestLines, Spell
from runtime.observe.scribe import Scribe
from runtime.observe.slow_steps import SlowSteps

if TYPE_CHECKING:
    from runtime.observe.traces import Traces

CLOSE_TIMEOUT_S = 3.0
"""How long a stop waits for lines and spans to be written out."""

_SCALE = 1 << 32
_SPREAD = 0x9E3779B1
"""2^32 over the golden ratio: multiples of it lie evenly in the whole of 32 bits (Knuth, TAOCP 3, §6.4)."""


def is_sampled(step_id: int, share: float) -> bool:
    """Whether a step is of those that become a span. A function of its number: all servers and readings agree."""
    return step_id * _SPREAD % _SCALE < share * _SCALE


class Observation:
    """An Observer, by the settings of a deployment. settings: with a served name."""

    def __init__(self, settings: ServeSettings) -> None:
        """Raises SettingsError where traces are wanted and their packages are missing."""
        model = settings.model.served_name or ""
        self.keeps_tokens = settings.logs.requests and settings.logs.texts
        self._step_share = settings.tracing.step_sample if settings.tracing.endpoint else 0.0
        self._lines = RequestLines(settings.logs, model)
        traces = [] if settings.tracing.endpoint is None else [_open_traces(settings, model)]
        self._scribe = Scribe([*([self._lines] if settings.logs.requests else []), *traces])
        self._slow_steps = SlowSteps(settings.logs.slow_step_ms)

    def spell_with(self, spell: Spell) -> None:
        """Has texts written as text. spell: may be called by another thread."""
        self._lines.spell = spell

    def note_request(self, record: RequestRecord) -> None:
        self._scribe.note(record)

    def note_step(self, record: StepRecord) -> None:
        self._slow_steps.note(record)
        if self._step_share and is_sampled(record.plan.step_id, self._step_share):
            self._scribe.note(record)

    async def close(self) -> None:
        """Writes out what waits, within CLOSE_TIMEOUT_S. Idempotent."""
        await self._scribe.close(CLOSE_TIMEOUT_S)


def _open_traces(settings: ServeSettings, model: str) -> Traces:
    try:
        from runtime.observe.traces import Traces
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"tracing.endpoint: is set, but the package of {error.name} is not installed; "
            "pip install 'outrider[otel]', or leave tracing.endpoint unset"
        ) from None
    return Traces(settings.tracing, model=model, version=metadata.version("outrider"))
