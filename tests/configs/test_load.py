"""Settings from YAML and flags: what wins, and what the errors say."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from configs.load import (
    BUNDLED,
    SettingsError,
    bundled_files,
    demo_checkpoint,
    key_paths,
    load_settings,
    parse_assignment,
    settings_file,
)
from configs.schema import ServeSettings, Settings


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return path

    return write


def test_nothing_given_serves_the_bundled_demo_on_loopback():
    settings = load_settings(None, {})
    assert settings.model.path == demo_checkpoint()
    assert settings.model.served_name == "demo"
    assert settings.server.host == ServeSettings().server.host == "127.0.0.1"


def test_later_sources_win_and_leave_the_rest(yaml_file):
    path = yaml_file("cache: {page_size: 32, memory_mib: 64}\nspeculation: {gamma: 2}\n")
    settings = load_settings(path, {"cache.page_size": 8, "server.port": 0})
    assert (settings.cache.page_size, settings.cache.memory_mib, settings.speculation.gamma) == (8, 64, 2)
    assert settings.server.port == 0
    assert settings.scheduler == ServeSettings().scheduler


def test_served_name_defaults_to_the_directory(tmp_path):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    path = tmp_path / "my-model"
    assert load_settings(None, {"model.path": path}).model.served_name == "my-model"
    assert load_settings(None, {"model.path": path, "model.served_name": "x"}).model.served_name == "x"


def test_relative_paths_in_a_file_start_at_the_file(tmp_path, yaml_file, monkeypatch):
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "config.json").write_text("{}")
    monkeypatch.chdir("/")
    text = "model: {path: ckpt}\nstate_dir: var\nspeculation: {profile: here.json}\n"
    settings = load_settings(yaml_file(text), {})
    assert settings.speculation.profile == tmp_path / "here.json"
    assert settings.model.path == tmp_path / "ckpt"
    assert settings.state_dir == tmp_path / "var"


def test_unknown_key_names_file_path_and_near_match(yaml_file):
    path = yaml_file("cache:\n  page_sise: 3\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(path, {})
    assert str(caught.value) == f"{path}: cache.page_sise: unknown key; did you mean cache.page_size?"


def test_key_in_the_wrong_block_is_pointed_to_its_own(yaml_file):
    with pytest.raises(SettingsError, match=r"server\.gamma: unknown key; did you mean speculation\.gamma\?"):
        load_settings(yaml_file("server: {gamma: 3}\n"), {})


def test_unknown_key_without_a_near_match_lists_the_block(yaml_file):
    with pytest.raises(
        SettingsError, match=r"xyzzy: unknown key; the top level has model, parallel, cache, .*, state_dir"
    ):
        load_settings(yaml_file("xyzzy: 1\n"), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "cache: {page_size: 0}",
            r"mine\.yaml: cache\.page_size: .*greater than or equal to 1, not 0 \(Tokens per KV page",
        ),
        ("model: {dtype: float8}", r"model\.dtype: .*'auto', 'float32' or 'bfloat16', not 'float8'"),
        (
            "speculation: {gamma: 4, gamma_max: 2}",
            r"speculation: gamma is 4 but gamma_max is 2; lower gamma or raise gamma_max$",
        ),
        ("cache: 7", r"cache: expected a block of keys \(memory_mib, "),
        ("- 1", r"mine\.yaml: expected a block of keys \(model, .*found a list"),
        ("a: [", r"mine\.yaml:\d+: "),
        ("cache:\n  page_size: 16\n  page_size: 32\n", r"mine\.yaml:3: page_size is given twice"),
        (
            "cache:\n  page_size: 2001-99-99\n",
            r"mine\.yaml:2: is no value of the kind that it looks like; put it in quotes$",
        ),
        ("cache: {? [page_size] : 16}", r"mine\.yaml:1: a key must be a name$"),
        pytest.param("[" * 5000, r"mine\.yaml: not YAML", id="nested"),
        (
            "server: {port: 7000}\nmetrics: {port: 7000}",
            r"metrics\.port is 7000, which server\.port is too; give another",
        ),
        ("server: {port: 7000}\noperator: {port: 7000}", r"operator\.port is 7000, which server\.port is too; give"),
        ("operator: {port: 7000}\nmetrics: {port: 7000}", r"operator\.port is 7000, which metrics\.port is too; give"),
        (
            "server: {port: 7000}\noperator: {port: 7001}",
            r"operator\.port is 7001, which metrics\.port auto is too; give",
        ),
        ("server: {health_port: 50051}", r"server\.health_port is 50051, which server\.port is too; give"),
        ("server: {health_port: yes}", r"server\.health_port: give a port from 0 to 65535 or none"),
        ("model: {path: /nowhere/at/all}", r"model\.path: /nowhere/at/all: no such directory; name a checkpoint"),
    ],
)
def test_a_bad_value_names_place_key_and_remedy(yaml_file, text, message):
    with pytest.raises(SettingsError, match=message):
        load_settings(yaml_file(text), {})


@pytest.mark.parametrize(
    ("text", "assignments", "expected"),
    [
        ("", [], (1, 1, 1)),
        ("parallel: {tp: 2}", [], (1, 2, 1)),
        ("parallel: {tp: 2, ep: 2}", [], (1, 2, 2)),
        ("parallel: {dp: 2, ep: 2}", [], (2, 1, 2)),
        ("parallel: {dp: 2}", ["parallel.tp=2", "parallel.ep=4"], (2, 2, 4)),
        ("parallel: {tp: 2, ep: 2}", ["parallel.ep=1"], (1, 2, 1)),
        ("parallel: {tp: 2, pp: 1}", ["parallel.pp=1"], (1, 2, 1)),
    ],
)
def test_layouts_come_from_files_and_assignments(yaml_file, text, assignments, expected):
    parallel = load_settings(yaml_file(text), dict(map(parse_assignment, assignments))).parallel
    assert (parallel.dp, parallel.tp, parallel.ep) == expected
    assert parallel.pp == 1


@pytest.mark.parametrize(
    ("text", "assignments", "message"),
    [
        (
            "parallel: {pp: 2}",
            [],
            r"mine\.yaml: parallel: pp is 2: pipeline parallelism is not served; use tp, dp and ep, and set pp to 1$",
        ),
        ("", ["parallel.pp=4"], r"parallel: pp is 4: pipeline parallelism is not served"),
        (
            "parallel: {tp: 2, dp: 2, ep: 2}",
            [],
            r"parallel: ep is 2; with dp 2 and tp 2 it is 1 \(experts cut over tp\) or 4 \(whole experts over",
        ),
        ("parallel: {tp: 2, ep: 2}", ["parallel.tp=4"], r"parallel: ep is 2; with dp 1 and tp 4 it is 1 .* or 4 "),
        ("parallel: {tp: 0}", [], r"parallel\.tp: .*greater than or equal to 1, not 0 \(Tensor-parallel ranks"),
        ("parallel: {dp: 1025}", [], r"parallel\.dp: .*less than or equal to 1024, not 1025"),
        ("parallel: {tp: two}", [], r"parallel\.tp: .*not 'two'"),
        ("parallel: {sp: 2}", [], r"parallel\.sp: unknown key; "),
        ("tp: 2", [], r"tp: unknown key; did you mean parallel\.tp\?"),
        ("cluster: {collectives: mpi}", [], r"cluster\.collectives: .*'auto', 'gloo' or 'nccl', not 'mpi'"),
    ],
)
def test_what_is_no_layout_is_refused_by_its_key(yaml_file, text, assignments, message):
    with pytest.raises(SettingsError, match=message):
        load_settings(yaml_file(text), dict(map(parse_assignment, assignments)))


def test_every_problem_is_reported_at_once(yaml_file):
    with pytest.raises(SettingsError) as caught:
        load_settings(yaml_file("cache: {page_size: 0}\nserver: {prt: 1}\n"), {"speculation.gamma": 99})
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert [line for line in lines if line.startswith("command line: speculation.gamma: ")]


def test_a_block_with_all_lines_commented_out_is_its_defaults(yaml_file):
    assert load_settings(yaml_file("cache:\n  # page_size: 3\n"), {}).cache == ServeSettings().cache


def test_missing_file_and_missing_config_are_told_apart_from_bundled_names(tmp_path):
    with pytest.raises(
        SettingsError, match="no such file; give the path of a YAML file or one of the bundled names cpu, demo, ref"
    ):
        settings_file(tmp_path / "absent.yaml")
    assert settings_file("cpu") == BUNDLED / "serve" / "cpu.yaml"


def test_a_home_that_nobody_has_is_refused_by_its_key(yaml_file):
    with pytest.raises(SettingsError, match=r"state_dir: ~no-such-user/x: no such home here; write the path out"):
        load_settings(yaml_file("state_dir: ~no-such-user/x"), {})


@pytest.mark.parametrize("use", [settings_file, lambda path: load_settings(path, {})])
def test_a_file_in_a_folder_that_is_closed_to_us_is_told_as_that(tmp_path, monkeypatch, use):
    def closed(path, *args, stat=os.stat, **kwargs):
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return stat(path, *args, **kwargs)

    path = tmp_path / "serve.yaml"
    monkeypatch.setattr(os, "stat", closed)
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: closed(path))
    with pytest.raises(SettingsError, match=r"serve\.yaml: Permission denied; give the path of a YAML file"):
        use(path)


@pytest.mark.parametrize("name", sorted(bundled_files()))
def test_every_bundled_file_loads_and_changes_something(name):
    settings = load_settings(settings_file(name), {})
    assert settings != load_settings(None, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a.b=3", ("a.b", 3)), ("a.b=x=y", ("a.b", "x=y")), ("a.b=", ("a.b", None)), ("a=[1, 2]", ("a", [1, 2]))],
)
def test_assignments_read_their_value_as_yaml(text, expected):
    assert parse_assignment(text) == expected


@pytest.mark.parametrize("text", ["a.b", "=3", "a=["])
def test_a_malformed_assignment_is_refused(text):
    with pytest.raises(SettingsError, match="--set"):
        parse_assignment(text)


def test_an_override_below_a_value_is_refused():
    with pytest.raises(SettingsError, match=r"state_dir\.x: state_dir holds a value"):
        load_settings(None, {"state_dir": "here", "state_dir.x": 1})


def test_every_setting_says_what_it_means():
    def fields(model: type[BaseModel]):
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
                assert (field.annotation.__doc__ or "").strip(), name
                yield from fields(field.annotation)
            else:
                yield name, field.description

    described = list(fields(ServeSettings))
    assert len(described) == len(list(key_paths(ServeSettings)))
    undescribed = [name for name, description in described if not description and name != "state_dir"]
    assert undescribed == []


def test_the_package_knows_where_it_is_installed():
    code = "from configs.load import demo_checkpoint; print((demo_checkpoint() / 'model.safetensors').is_file())"
    found = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


def test_slices_of_reference_numerics_divide_among_the_ranks() -> None:
    reference = {"model.numerics": "reference", "parallel.tp": 2}
    with pytest.raises(SettingsError, match=r"command line: model\.k_slices: 3 slices .* parallel\.tp 2 .* a multiple"):
        load_settings(None, {**reference, "model.k_slices": 3})
    assert load_settings(None, {**reference, "model.k_slices": 4}).model.k_slices == 4
    assert load_settings(None, {"parallel.tp": 2, "model.k_slices": 3}).model.k_slices == 3
