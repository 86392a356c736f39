"""Files of a configuration that change while they are watched: in whatever way, and never half."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.config_desk import BASE, Desk, changed

from runtime.access.watched import Watched
from runtime.in_force import SettingsInForce
from runtime.reload import Reloader, SettingsSource
from runtime.status import Reloads


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def replaced(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.rename(path)


def written_over(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.mark.parametrize("change", [replaced, written_over])
def test_a_change_of_the_file_is_taken_once_it_has_settled(desk: Desk, change: Callable[[Path, str], None]) -> None:
    desk.look(3)
    assert desk.reloader.status() == Reloads()
    change(desk.path, yaml.safe_dump(changed(scheduler={"max_waiting": 12})))
    desk.look()
    assert desk.settings.now.scheduler.max_waiting == 7, "it may be half there"
    desk.look()
    assert desk.settings.now.scheduler.max_waiting == 12
    desk.look(3)
    assert desk.reloader.status() == Reloads(applied=1)


def test_a_file_that_is_being_written_never_counts_as_one_that_says_less(desk: Desk) -> None:
    """An empty file is a good configuration, of defaults; nobody has asked for it."""
    for text in (
        "",
        "scheduler:",
        "scheduler: {max_waiting: 1",
        yaml.safe_dump(changed(scheduler={"max_waiting": 13})),
    ):
        desk.write(text)
        desk.look()
        assert desk.settings.now.scheduler.max_waiting == 7
    desk.look()
    assert desk.settings.now.scheduler.max_waiting == 13
    assert desk.reloader.status() == Reloads(applied=1)


def test_a_file_that_goes_and_comes_back(desk: Desk) -> None:
    desk.path.unlink()
    desk.look(5)
    status = desk.reloader.status()
    assert (status.refused, "serve.yaml" in status.problem) == (1, True), "told once"
    desk.write(changed(scheduler={"max_waiting": 14}))
    desk.look(2)
    assert (desk.settings.now.scheduler.max_waiting, desk.reloader.status().problem) == (14, "")


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_link_that_is_turned_as_kubernetes_does(tmp_path: Path, is_folder: bool) -> None:
    """Files are links into `..data`, which is a link to a folder of one moment, replaced by a rename."""
    mount = tmp_path / "config"
    mount.mkdir()

    def turn(moment: str, document: dict[str, Any]) -> None:
        (mount / moment).mkdir()
        (mount / moment / "serve.yaml").write_text(yaml.safe_dump(document))
        (mount / "..data_tmp").symlink_to(moment)
        os.rename(mount / "..data_tmp", mount / "..data")

    turn("..2026_1", BASE)
    (mount / "serve.yaml").symlink_to("..data/serve.yaml")
    source = SettingsSource(path=mount if is_folder else mount / "serve.yaml")
    in_force = SettingsInForce(source.load())
    reloader = Reloader(in_force, source)
    for number in (2, 3):
        turn(f"..2026_{number}", changed(scheduler={"max_waiting": 20 + number}))
        asyncio.run(reloader.look())
        asyncio.run(reloader.look())
        assert in_force.now.scheduler.max_waiting == 20 + number
    assert reloader.status() == Reloads(applied=2)


def test_a_folder_of_files_is_read_again_when_one_of_them_changes_comes_or_goes(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(BASE))
    source = SettingsSource(path=tmp_path)
    in_force = SettingsInForce(source.load())
    reloader = Reloader(in_force, source)

    def look_twice() -> tuple[int, str]:
        for _ in range(2):
            asyncio.run(reloader.look())
        return in_force.now.scheduler.max_waiting, in_force.now.logs.level

    (tmp_path / "a.yaml").write_text(yaml.safe_dump(changed(scheduler={"max_waiting": 31})))
    assert look_twice() == (31, "info")
    (tmp_path / "b.yaml").write_text("logs: {level: error}")
    assert look_twice() == (31, "error")
    (tmp_path / "b.yaml").unlink()
    assert look_twice() == (31, "info")


def test_certificates_and_identities_are_looked_at_by_the_same_task(desk: Desk, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("1")
    desk.watched = [Watched("numbers", [other], lambda: int(other.read_text()))]
    other.write_text("22")
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(desk.reloader.watch(sleep))
    assert (desk.watched[0].current, slept) == (22, [1.0] * 3)
    other.write_text("333")
    desk.reload()
    assert desk.watched[0].current == 333, "and at once where somebody asks"


def test_a_defect_in_one_file_ends_no_watch_over_the_others(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def check(self) -> bool:
            raise KeyError("a defect")

    desk.watched = [Broken()]  # type: ignore[list-item]
    turns = iter(range(9))

    async def sleep(seconds: float) -> None:
        if next(turns) == 1:
            desk.write(changed(scheduler={"max_waiting": 15}))
        elif desk.settings.now.scheduler.max_waiting == 15:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(desk.reloader.watch(sleep))
    assert "a file could not be looked at" in caplog.text


def test_a_change_between_the_start_and_the_first_look_is_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    desk.write(changed(scheduler={"max_waiting": 8}))
    late = Reloader(desk.settings, desk.source, desk.policies)
    asyncio.run(late.look())
    assert desk.settings.now.scheduler.max_waiting == 8
    caplog.clear()
    with caplog.at_level(logging.INFO, "outrider.audit"):
        asyncio.run(Reloader(desk.settings, desk.source).look())
    assert caplog.messages == [], "and where there was none, nobody hears of it"
