"""The pipeline of log lines: both formats, names of the call in hand, and what must never get through."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator

import pytest

from configs.observability import LogSettings
from runtime.audit import AUDIT
from runtime.observe.logs import OURS, configure_logs, naming

log = logging.getLogger("runtime.somewhere")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., io.StringIO]]:
    """Configures logs of this process onto a standard error of the test's, and puts everything back."""
    root = logging.getLogger()
    kept = root.level, root.handlers[:], {name: logging.getLogger(name).level for name in (*OURS, AUDIT.name)}

    def configure(*, terminal: bool = False, **settings: object) -> io.StringIO:
        error = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr(sys, "stderr", error)
        configure_logs(LogSettings(**settings))  # type: ignore[arg-type]
        return error

    yield configure
    logging.captureWarnings(False)
    root.handlers[:] = kept[1]
    root.setLevel(kept[0])
    for name, level in kept[2].items():
        logging.getLogger(name).setLevel(level)


def lines_of(error: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in error.getvalue().splitlines()]


def test_an_object_per_line_where_there_is_no_terminal(configured) -> None:
    error = configured()
    log.info("%d of %d\nbroken", 3, 5, extra={"rows": 7, "_of_a_library": 9})
    [line] = lines_of(error)
    assert list(line)[4:] == ["rows"]
    assert list(line)[:4] == ["timestamp", "level", "logger", "event"]
    assert (line["event"], line["level"], line["logger"], line["rows"]) == (
        "3 of 5\nbroken",
        "info",
        "runtime.somewhere",
        7,
    )
    assert str(line["timestamp"]).endswith("Z")


@pytest.mark.parametrize(
    ("form", "terminal", "is_json"), [("auto", True, False), ("json", True, True), ("console", False, False)]
)
def test_the_format_follows_the_setting_before_the_terminal(configured, form, terminal, is_json) -> None:
    error = configured(terminal=terminal, format=form)
    log.warning("hello")
    assert error.getvalue().startswith("{") == is_json
    assert ("\x1b[" in error.getvalue()) == (terminal and not is_json), "colours are for terminals"


def test_what_the_call_is_called_stands_in_every_line_of_it(configured) -> None:
    error = configured()
    with naming(request_id="r1", identity=""):
        log.info("inside")
        logging.getLogger("someone.else").warning("inside too")
    log.info("outside")
    assert [line.get("request_id") for line in lines_of(error)] == ["r1", "r1", None]
    assert "identity" not in lines_of(error)[0]


def test_levels_are_ours_and_others_are_heard_from_warnings_on(configured) -> None:
    error = configured(level="debug")
    log.debug("ours")
    logging.getLogger("someone.else").info("theirs")
    logging.getLogger("someone.else").warning("theirs, graver")
    assert [line["event"] for line in lines_of(error)] == ["ours", "theirs, graver"]
    error = configured(level="error")
    log.warning("not said")
    AUDIT.info("said all the same")
    assert [line["event"] for line in lines_of(error)] == ["said all the same"]


def test_warnings_of_python_are_lines_too(configured) -> None:
    error = configured()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("deprecated", stacklevel=1)
    [line] = lines_of(error)
    assert "deprecated" in str(line["event"])


@pytest.mark.parametrize("form", ["json", "console"])
def test_tracebacks_tell_no_values(configured, form) -> None:
    error = configured(format=form)

    def fail(prompt: str) -> None:
        raise KeyError("a defect")

    try:
        fail("the words of " + "somebody")
    except KeyError:
        log.exception("it failed")
    assert "Traceback" in error.getvalue()
    assert "a defect" in error.getvalue()
    assert "words of somebody" not in error.getvalue()


def test_control_characters_do_not_reach_a_terminal(configured) -> None:
    error = configured(terminal=True, format="console")
    log.warning("he said \x1b[2Jnothing\rat all", extra={"field": "\x1b[31mred"})
    assert "\x1b[2J" not in error.getvalue()
    assert "\x1b[31mred" not in error.getvalue()
    assert "\\x1b[2Jnothing\\rat all" in error.getvalue()


def test_a_second_configuration_takes_the_place_of_the_first(configured) -> None:
    configured()
    error = configured()
    log.warning("once")
    assert len(lines_of(error)) == 1


@pytest.mark.parametrize("size", [10, 9000])
def test_who_logs_is_not_held_by_a_reader_that_has_stopped_reading(configured, monkeypatch, size: int) -> None:
    """As a container's runtime that hangs would hold the server."""
    configured()
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as error:
        monkeypatch.setattr(sys, "stderr", error)
        began_s = time.monotonic()
        for number in range(1000):
            log.warning("%d %s", number, "x" * size)
        assert time.monotonic() - began_s < 10
        os.set_blocking(reading, False)
        kept = reader.read()
        log.warning("back again")
        lost, back = [json.loads(line) for line in reader.read().strip().splitlines()]
        monkeypatch.setattr(sys, "stderr", io.StringIO())
    whole = [line for line in kept.splitlines() if line.endswith("}")]
    assert [json.loads(line)["event"].split()[0] for line in whole] == [str(number) for number in range(len(whole))]
    assert lost["event"].startswith(f"{1000 - len(whole)} lines of the log are lost")
    assert back["event"] == "back again"
