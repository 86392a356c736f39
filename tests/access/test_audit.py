"""The audit log as a file: a JSON object per line, for the owner alone, whatever happens to the file."""

from __future__ import annotations

import json
import logging
import resource
import stat

import pytest

from runtime.access.identity import CALLER, Identity, Role
from runtime.audit import AUDIT, audit, kept_in

ADA = Identity(name="ada", roles=frozenset({Role.OPERATE}))


@pytest.fixture
def ada():
    token = CALLER.set(ADA)
    yield
    CALLER.reset(token)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_act_is_a_line_with_who_what_when_and_outcome(tmp_path, ada):
    path = tmp_path / "audit.jsonl"
    with kept_in(path):
        audit("Drain", "drains\nnothing é", peer="ipv4:127.0.0.1:1", running=3, waiting=0)
        audit("Abort", "was refused", peer="ipv4:127.0.0.1:1", outcome="PERMISSION_DENIED", level=logging.WARNING)
    first, second = lines(path)
    assert first.pop("time").endswith("Z")
    assert first == {
        "identity": "ada",
        "peer": "ipv4:127.0.0.1:1",
        "act": "Drain",
        "outcome": "OK",
        "text": "ada@ipv4:127.0.0.1:1 drains\nnothing é",
        "details": {"running": 3, "waiting": 0},
    }
    assert (second["act"], second["outcome"], second["details"]) == ("Abort", "PERMISSION_DENIED", {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_the_server_does_by_itself_is_the_servers(tmp_path, ada):
    path = tmp_path / "audit.jsonl"
    with kept_in(path):
        audit("ReloadIdentities", "read 2 identities anew")
        AUDIT.error("a file cannot be read")
    assert [(line["identity"], line["peer"], line["act"]) for line in lines(path)] == [
        ("server", None, "ReloadIdentities"),
        ("server", None, "outrider.audit"),
    ]


def test_lines_are_added_to_those_of_before_and_to_a_new_file_when_the_old_one_is_moved(tmp_path):
    path, moved = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    for text in ("first", "second"):
        with kept_in(path):
            audit("Drain", text)
    with kept_in(path):
        path.rename(moved)
        audit("Drain", "third")
    assert [line["text"] for line in lines(moved)] == ["server first", "server second"]
    assert [line["text"] for line in lines(path)] == ["server third"]


def test_a_file_that_cannot_be_written_is_told_at_start(tmp_path):
    with (
        pytest.raises(OSError, match=f"access.audit_log {tmp_path} cannot be written: Is a directory"),
        kept_in(tmp_path),
    ):
        pass


def test_a_file_that_can_no_longer_be_written_is_told_once_and_the_server_goes_on(tmp_path, caplog):
    folder = tmp_path / "logs"
    folder.mkdir()
    with kept_in(folder / "audit.jsonl"):
        audit("Drain", "first")
        (folder / "audit.jsonl").unlink()
        folder.rmdir()
        with caplog.at_level(logging.ERROR, "runtime.audit"):
            for _ in range(3):
                audit("Drain", "lost")
        assert len([record for record in caplog.records if record.name == "runtime.audit"]) == 1
        folder.mkdir()
        audit("Drain", "back")
    assert [line["text"] for line in lines(folder / "audit.jsonl")] == ["server back"]


def test_a_line_that_found_room_for_a_part_alone_spoils_no_other(tmp_path, caplog):
    path = tmp_path / "audit.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with kept_in(path):
        audit("Drain", "first")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
        try:
            audit("Drain", "cut off")
            audit("Drain", "lost")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        audit("Drain", "back")
    assert len([record for record in caplog.records if record.name == "runtime.audit"]) == 1
    first, torn, back = path.read_text().splitlines()
    assert [json.loads(line)["text"] for line in (first, back)] == ["server first", "server back"]
    assert len(torn) == 20


def test_a_file_that_nobody_keeps_any_more_is_closed(tmp_path):
    before = list(AUDIT.handlers)
    with kept_in(tmp_path / "audit.jsonl"):
        assert len(AUDIT.handlers) == len(before) + 1
    assert AUDIT.handlers == before
    with kept_in(None):
        assert AUDIT.handlers == before
