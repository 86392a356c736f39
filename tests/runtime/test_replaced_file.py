"""Files are replaced whole; what is no plain file is written as it stands."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.replaced_file import replace_text


@pytest.mark.parametrize("lasting", [False, True])
def test_a_file_is_replaced_keeps_its_mode_and_nothing_is_left_beside_it(tmp_path: Path, lasting: bool) -> None:
    path = tmp_path / "made" / "file"
    replace_text(path, "one", lasting=lasting)
    path.chmod(0o640)
    replace_text(path, "two", lasting=lasting)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("two", 0o640)
    assert [one.name for one in path.parent.iterdir()] == ["file"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    replace_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_link_to_nothing_yet_makes_the_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    replace_text(tmp_path / "link", "new")
    assert (tmp_path / "target").read_text() == "new"


def test_a_pipe_is_written_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit((tmp_path / "pipe").read_text)
        replace_text(tmp_path / "pipe", "through")
        assert read.result(timeout=30) == "through"
    assert (tmp_path / "pipe").is_fifo()


def test_a_device_that_takes_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")  # by a link: a test that fails must not cost the machine its device
    with pytest.raises(OSError, match="No space"):
        replace_text(tmp_path / "full", "too much")


def test_where_it_cannot_be_written_the_old_text_stands(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / "file", "\ud800")
    assert (tmp_path / "file").read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_processes_that_have_the_same_number_do_not_write_into_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers in containers that share a folder may all be process 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    path, texts = tmp_path / "file", [letter * 200_000 for letter in "abcd"]
    with ThreadPoolExecutor(4) as writers:
        for _ in range(5):
            list(writers.map(lambda text: replace_text(path, text), texts))
            assert path.read_text() in texts
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
