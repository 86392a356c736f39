"""A folder of settings files, as a Kubernetes volume of several ConfigMaps makes one."""

from __future__ import annotations

import asyncio

import pytest

from configs.load import SettingsError, files_at, load_settings, settings_file
from runtime.front.errors import RefusedSettings
from runtime.in_force import SettingsInForce
from runtime.reload import Reloader, SettingsSource


def test_files_of_a_folder_are_one_document(tmp_path):
    (tmp_path / "a.yaml").write_text("server: {port: 50060}\nstate_dir: state\n")
    (tmp_path / "b.yaml").write_text("server: {drain_s: 3}\nspeculation: {gamma: 2}\n")
    (tmp_path / "notes.txt").write_text("not: settings")
    (tmp_path / ".c.yaml").write_text("unknown: 1")
    settings = load_settings(settings_file(tmp_path), {"speculation.gamma": 1})
    assert (settings.server.port, settings.server.drain_s, settings.speculation.gamma) == (50060, 3, 1)
    assert settings.state_dir == tmp_path / "state"


def test_hidden_folders_of_a_volume_are_not_read_twice(tmp_path):
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "serve.yaml").write_text("server: {port: 50060}")
    (tmp_path / "serve.yaml").symlink_to("..data/serve.yaml")
    assert files_at(tmp_path) == (tmp_path / "serve.yaml",)
    assert load_settings(tmp_path, {}).server.port == 50060


@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        ("server: {port: 1}", "server: {port: 2}", r"server\.port"),
        ("server: {port: 1}", "server: 3", "server"),
        ("state_dir: a", "state_dir: b", "state_dir"),
    ],
)
def test_what_two_files_give_is_refused_by_key(tmp_path, one, other, key):
    (tmp_path / "a.yaml").write_text(one)
    (tmp_path / "b.yaml").write_text(other)
    with pytest.raises(SettingsError, match=rf"b\.yaml: {key}: another file of .* gives it too; keep one"):
        load_settings(tmp_path, {})


def test_a_folder_without_settings_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"is a directory without a \.yaml file"):
        settings_file(tmp_path)


def test_a_folder_that_loses_its_last_file_is_refused_and_does_not_say_all_as_by_default(tmp_path):
    (tmp_path / "a.yaml").write_text("server: {drain_s: 3}")
    source = SettingsSource(path=settings_file(tmp_path))
    now = SettingsInForce(source.load())
    reloader = Reloader(now, source)
    (tmp_path / "a.yaml").unlink()
    with pytest.raises(RefusedSettings, match=r"is a directory without a \.yaml file"):
        asyncio.run(reloader.reload())
    assert now.now.server.drain_s == 3


def test_a_link_to_nowhere_is_a_file_that_cannot_be_read(tmp_path):
    """Left out it would be a configuration that says less."""
    (tmp_path / "a.yaml").write_text("server: {drain_s: 3}")
    (tmp_path / "b.yaml").symlink_to("..data/b.yaml")
    with pytest.raises(SettingsError, match=r"b\.yaml: No such file or directory"):
        load_settings(tmp_path, {})


def test_a_file_that_changes_in_the_folder_is_read_again(tmp_path):
    (tmp_path / "a.yaml").write_text("server: {port: 50060}")
    (tmp_path / "b.yaml").write_text("server: {drain_s: 3}")
    source = SettingsSource(path=tmp_path)
    now = SettingsInForce(source.load())
    reloader = Reloader(now, source)

    async def looks() -> None:
        for _ in range(2):  # a change is taken when it has stayed for one look
            await reloader.look()

    asyncio.run(looks())
    assert now.now.server.drain_s == 3
    (tmp_path / "b.yaml").write_text("server: {drain_s: 4}\n# longer than before")
    asyncio.run(looks())
    assert now.now.server.drain_s == 4
