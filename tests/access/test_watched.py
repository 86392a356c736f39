"""Values read from files: taken anew when a file changes, kept when the new one cannot be used."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from configs.load import SettingsError
from runtime.access.watched import Watched


def number_in(path: Path) -> Watched[int]:
    return Watched("numbers", [path], lambda: int(path.read_text()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "number"
    path.write_text("1")
    return path


def test_an_unchanged_file_is_not_read_again(path):
    reads = []
    watched = Watched("numbers", [path], lambda: reads.append(1))
    assert not watched.check()
    assert reads == [1]


@pytest.mark.parametrize("way", ["written over", "renamed into place", "a link turned elsewhere", "touched"])
def test_a_change_is_taken(tmp_path, path, way):
    if way == "a link turned elsewhere":
        for name in ("old", "new"):
            (tmp_path / name).mkdir()
        (tmp_path / "old" / "number").write_text("1")
        (tmp_path / "data").symlink_to("old")
        path = tmp_path / "data" / "number"
    watched = number_in(path)
    if way == "written over":
        path.write_text("20")
    elif way == "renamed into place":
        (tmp_path / "next").write_text("20")
        (tmp_path / "next").replace(path)
    elif way == "touched":
        os.utime(path, ns=(1, 1))
    else:
        (tmp_path / "new" / "number").write_text("20")
        (tmp_path / "turned").symlink_to("new")
        (tmp_path / "turned").replace(tmp_path / "data")
    assert watched.check()
    assert watched.current == (1 if way == "touched" else 20)
    assert watched.num_changes == 1
    assert not watched.check()


def test_a_file_that_cannot_be_used_leaves_the_old_value_and_says_so_once(path, caplog):
    watched = number_in(path)
    path.write_text("one hundred")
    with caplog.at_level(logging.ERROR):
        assert not watched.check()
        assert not watched.check()
    assert (watched.current, watched.num_refusals) == (1, 1)
    assert [("one hundred" in record.message, "numbers" in record.message) for record in caplog.records] == [
        (True, True)
    ]
    assert "one hundred" in (watched.problem or "")
    path.write_text("3")
    assert watched.check()
    assert (watched.current, watched.problem) == (3, None)


def test_a_file_that_goes_and_comes_back(path):
    watched = number_in(path)
    path.unlink()
    assert not watched.check()
    assert watched.current == 1
    path.write_text("1")
    assert watched.check()


def test_one_of_two_files_is_enough(tmp_path, path):
    other = tmp_path / "other"
    other.write_text("5")
    watched = Watched("numbers", [path, other], lambda: int(path.read_text()) + int(other.read_text()))
    other.write_text("50")
    assert watched.check()
    assert watched.current == 51


def test_whoever_uses_the_value_may_refuse_it(path):
    taken = []

    def take(value: int) -> None:
        if value > 9:
            raise SettingsError("too large to be taken into use")
        taken.append(value)

    watched = Watched("numbers", [path], lambda: int(path.read_text()), take)
    path.write_text("10")
    assert not watched.check()
    path.write_text("007")
    assert watched.check()
    assert (watched.current, taken, watched.num_refusals) == (7, [7], 1)


def test_the_first_value_must_be_usable(path):
    path.write_text("one")
    with pytest.raises(ValueError, match="one"):
        number_in(path)


def test_a_defect_is_no_refusal(path):
    def take(value: int) -> None:
        raise KeyError(value)

    watched = Watched("numbers", [path], lambda: int(path.read_text()), take)
    path.write_text("22")
    with pytest.raises(KeyError):
        watched.check()
