"""`outrider doctor` as a whole: one check hurts no other, children end in time, and the exit code says how it is."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from fakes.inquiries import CHECKPOINT, DEVICES, inquiry
from typer.testing import CliRunner

import runtime.doctor.examination
import runtime.doctor.inquiry
from runtime.cli.doctor import doctor as doctor_command
from runtime.cli.main import app
from runtime.cli.serve import serve
from runtime.doctor.child import ChildFailed, ask_child
from runtime.doctor.examination import CHECKS, examine
from runtime.doctor.finding import Finding, Level, failure, note, ok, warning
from runtime.doctor.inquiry import Inquiry, Once


def fine(inquiry: Inquiry) -> Iterator[Finding]:
    yield ok("all is well")


def broken(inquiry: Inquiry) -> Iterator[Finding]:
    yield ok("so far")
    raise KeyError("a defect")


def test_a_check_that_fails_or_hangs_leaves_the_others_alone() -> None:
    end = threading.Event()

    def hang(inquiry: Inquiry) -> Iterator[Finding]:
        end.wait()
        yield ok("too late")

    report = examine(inquiry(), {"one": (fine,), "two": (broken, fine), "three": (hang,)}, limit_s=0.3)
    end.set()
    assert [finding.level for finding in report.topics["one"]] == [Level.OK]
    assert [finding.level for finding in report.topics["two"]] == [Level.FAILURE, Level.OK]
    assert "broken failed: KeyError" in report.topics["two"][0].text
    assert "said nothing within 0.3 s" in report.topics["three"][0].text
    assert list(report.topics) == ["one", "two", "three"]
    assert not report.is_well


@pytest.mark.parametrize(
    ("finding", "is_well"),
    [(ok("x"), True), (note("x"), True), (warning("x", "y"), True), (failure("x", "y"), False)],
)
def test_only_failures_are_a_no(finding: Finding, is_well: bool) -> None:
    assert examine(inquiry(), {"one": (lambda _: iter([finding]),)}).is_well is is_well


def test_every_check_says_something_of_a_healthy_installation() -> None:
    look = inquiry(server__port=0, metrics__port=0)
    quick = {topic: checks for topic, checks in CHECKS.items() if topic != "collectives"}
    report = examine(look, quick)
    assert report.is_well, [finding for findings in report.topics.values() for finding in findings]
    assert all(report.topics.values())


def test_a_child_is_asked_once_by_all_threads() -> None:
    calls = []

    def ask() -> int:
        calls.append(1)
        if len(calls) == 1:
            time.sleep(0)
        return 7

    once: Once[int] = Once(ask)
    threads = [threading.Thread(target=once) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (once(), len(calls)) == (7, 1)


def test_an_error_of_a_child_is_everybodys() -> None:
    def ask() -> int:
        raise ChildFailed("no")

    once: Once[int] = Once(ask)
    for _ in range(2):
        with pytest.raises(ChildFailed, match="no"):
            once()


def test_children_that_die_talk_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "says.py").write_text("import sys\nprint('noise')\nprint('{\"got\": \"' + sys.stdin.read() + '\"}')")
    (tmp_path / "dies.py").write_text("raise ImportError('libtorch is a teapot')")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)")
    assert ask_child("says", timeout_s=20, given="hello") == {"got": "hello"}
    with pytest.raises(ChildFailed, match="ImportError: libtorch is a teapot"):
        ask_child("dies", timeout_s=20)
    began_s = time.monotonic()
    with pytest.raises(ChildFailed, match=r"within 0\.5 s"):
        ask_child("hangs", timeout_s=0.5)
    assert time.monotonic() - began_s < 10


@pytest.fixture
def without_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's word taken for granted: starting it takes seconds, and it has tests of its own."""

    def answer(*command: str, **more: Any) -> dict[str, Any]:
        return {"devices": DEVICES, "checkpoint": CHECKPOINT}[command[1]]

    monkeypatch.setattr(runtime.doctor.inquiry, "ask_child", answer)
    checks = {topic: checks for topic, checks in CHECKS.items() if topic not in ("collectives", "clock")}
    monkeypatch.setattr(runtime.doctor.examination.examine, "__defaults__", (checks,))


def doctor(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", "--launcher", "process", "--set", "server.port=0", *arguments])


@pytest.mark.usefixtures("without_children")
def test_the_command_prints_remedies_and_says_no_where_something_is_wrong(tmp_path: Path) -> None:
    well = doctor()
    assert well.exit_code == 0, well.output
    assert "it will work" in well.stdout
    ill = doctor("--set", f"access.identities={tmp_path / 'none.yaml'}")
    assert ill.exit_code == 1
    assert "FAILURE" in ill.stdout
    assert "do: " in ill.stdout
    assert "it will not work" in ill.stdout


@pytest.mark.usefixtures("without_children")
def test_json_for_scripts(tmp_path: Path) -> None:
    document = json.loads(doctor("--json").stdout)
    assert document["is_well"] is True
    assert {finding["topic"] for finding in document["findings"]} >= {"versions", "ports", "torch", "checkpoint"}
    ill = doctor("--json", "--set", f"access.identities={tmp_path / 'none.yaml'}")
    assert ill.exit_code == 1
    assert any(one["level"] == "failure" and one["remedy"] for one in json.loads(ill.stdout)["findings"])


@pytest.mark.usefixtures("without_children")
def test_what_serve_is_called_with_can_be_asked_about() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        arguments = [*("--launcher", "process", "--port", port, "--metrics-port", "none"), "--policy", "dynamic"]
        result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stdout
    assert "speculation.policy is dynamic" in result.stdout
    assert signature(doctor_command).parameters.keys() >= signature(serve).parameters.keys()


def test_settings_that_cannot_be_read_are_the_usual_error() -> None:
    result = doctor("--set", "server.prot=1")
    assert result.exit_code == 2
    assert "did you mean server.port" in result.stderr.replace("\n", " ")
