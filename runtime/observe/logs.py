"""What log lines look like and where they go: every logger of this process through one pipeline, to standard error.

Modules log as ever, with `logging`. What the call in hand is called (`naming`) is put into every line of its task.
Knows no request and no step.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import structlog

from configs.observability import LogSettings
from runtime.audit import AUDIT

OURS = ("outrider", "runtime", "workers", "parallel", "state", "configs")
"""Loggers of this product. Those of others say warnings and what is graver, whatever `logs.level` says."""

PATIENCE_S = 0.5
"""How long a line waits for room, before lines are dropped."""

PIPE_BYTES = select.PIPE_BUF
"""What a pipe takes at once where it has any room."""

_OF_STRUCTLOG = ("_record", "_from_structlog")
"""Of those that processors hand on, taken out before a line is rendered."""

Fields = MutableMapping[str, Any]


@contextmanager
def naming(**names: str) -> Iterator[None]:
    """Puts what has a value into all lines that are logged inside, by this task and by what takes over its context."""
    with structlog.contextvars.bound_contextvars(**{name: value for name, value in names.items() if value}):
        yield


def configure_logs(settings: LogSettings) -> None:
    """Has every logger of the process write as the settings say. May be called again."""
    handler = _StandardError()
    handler.setFormatter(formatter_of(settings))
    level: int = getattr(logging, settings.level.upper())
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(level)
    AUDIT.setLevel(logging.INFO)
    logging.captureWarnings(True)


def formatter_of(settings: LogSettings) -> logging.Formatter:
    """Renders records of any logger."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    is_console = settings.format == "console" or (settings.format == "auto" and is_terminal)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        _without_private_fields,
        _add_time,
    ]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(is_console, is_terminal)],
    )


def _rendering(is_console: bool, is_terminal: bool) -> list[structlog.typing.Processor]:
    # Tracebacks are plain: those with the values of local variables would tell prompts and tokens.
    if is_console:
        colors = is_terminal and not os.environ.get("NO_COLOR")
        return [
            _without_control_characters,
            structlog.dev.ConsoleRenderer(
                colors=colors, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback, sort_keys=False
            ),
        ]
    return [structlog.processors.format_exc_info, _in_order, structlog.processors.JSONRenderer()]


def _without_private_fields(logger: object, method: str, fields: Fields) -> Fields:
    """What libraries put into records for themselves, as Ray does."""
    return {name: value for name, value in fields.items() if not name.startswith("_") or name in _OF_STRUCTLOG}


def _add_time(logger: object, method: str, fields: Fields) -> Fields:
    """When the line was logged, in UTC, to the millisecond."""
    created = datetime.fromtimestamp(fields["_record"].created, UTC)
    fields["timestamp"] = created.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return fields


def _in_order(logger: object, method: str, fields: Fields) -> Fields:
    first = ("timestamp", "level", "logger", "event")
    return {name: fields[name] for name in first if name in fields} | dict(fields)


def _without_control_characters(logger: object, method: str, fields: Fields) -> Fields:
    """What a client sent may stand in a line, and would else move a terminal's cursor."""
    for name, value in fields.items():
        if isinstance(value, str) and name != "exception" and not value.isprintable():
            fields[name] = "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in value)
    return fields


class _StandardError(logging.Handler):
    """Writes to what standard error is at that moment: a progress bar puts a stream of its own in its place.

    Whoever logs waits while a line is written, the event loop that serves among them. Where nobody reads what has been
    written (a pipe to a process that hangs, a terminal on hold), that is for PATIENCE_S; what is logged from then on,
    until there is room again, is dropped and counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_lost = 0
        self._is_cut = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._num_lost and self._write(self.format(_lost(self._num_lost)) + "\n"):
                self._num_lost = 0
            if self._num_lost or not self._write(self.format(record) + "\n"):
                self._num_lost += 1
        except Exception:
            self.handleError(record)

    def _write(self, text: str) -> bool:
        """False where there was no room for the whole of it."""
        text = f"\n{text}" if self._is_cut else text
        size = PIPE_BYTES if text.isascii() else PIPE_BYTES // 4
        for begin in range(0, len(text), size):
            if not _has_room(0.0 if self._num_lost else PATIENCE_S):
                return False
            sys.stderr.write(text[begin : begin + size])
            sys.stderr.flush()
            self._is_cut = begin + size < len(text)
        return True


def _lost(num_lines: int) -> logging.LogRecord:
    told = "%d lines of the log are lost or cut short: nobody read what was written"
    return logging.LogRecord(__name__, logging.WARNING, "", 0, told, (num_lines,), None)


def _has_room(timeout_s: float) -> bool:
    """Whether standard error takes PIPE_BYTES without waiting for longer than that."""
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # something else stands in its place
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(1000 * timeout_s))
