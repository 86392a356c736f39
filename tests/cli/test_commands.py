"""The command line as its users meet it: help, one-line errors, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import typer
import yaml
from fakes.commands import closed_port
from typer.testing import CliRunner

from configs.load import SettingsError, load_settings
from configs.schema import ServeSettings
from runtime.cli import console
from runtime.cli.main import app
from runtime.cli.options import checked_address
from runtime.cli.serve_flags import FLAG_KEYS, settings_from_flags
from runtime.front.errors import InternalError, InvalidRequest, Unavailable
from workers.plan import LoadError

COMMANDS = (
    *("serve", "generate", "demo", "policy", "status", "top", "requests", "abort", "drain", "resume", "check"),
    *("bench", "health", "settings"),
)


@pytest.fixture
def outrider():
    def call(*arguments: str):
        return CliRunner().invoke(app, arguments)

    return call


@pytest.fixture(scope="module")
def closed_address():
    with closed_port() as address:
        yield address


def test_help_names_every_command(outrider):
    result = outrider("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f" {command} " in result.output
        assert outrider(command, "--help").exit_code == 0


def test_version_is_the_installed_one(outrider):
    assert outrider("--version").output.strip() == "0.1.0"


def test_every_flag_sets_a_setting_that_exists():
    for key in FLAG_KEYS.values():
        block, name = key.split(".")
        assert name in type(getattr(ServeSettings(), block)).model_fields


def test_an_unknown_key_ends_serve_with_one_line_and_code_2(outrider, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("server: {prot: 1}\n")
    result = outrider("serve", "--config", str(path))
    assert result.exit_code == console.EXIT_USAGE
    assert result.stderr == f"error: {path}: server.prot: unknown key; did you mean server.port?\n"


def test_flags_win_over_set_and_set_over_the_file(outrider):
    result = outrider("serve", "--config", "cpu", "--set", "speculation.gamma=3", "--gamma", "99")
    assert result.exit_code == console.EXIT_USAGE
    assert result.stderr.startswith("error: command line: speculation.gamma: ")
    assert "not 99" in result.stderr


def test_a_directory_in_place_of_a_settings_file_is_called_one(outrider, tmp_path):
    result = outrider("serve", "--config", str(tmp_path))
    assert result.exit_code == console.EXIT_USAGE
    told = f"error: {tmp_path}: is a directory without a .yaml file; give the path of a settings file\n"
    assert result.stderr == told


def test_a_step_too_short_for_a_verify_pass_is_refused_before_anything_is_loaded(outrider):
    result = outrider("serve", "--set", "scheduler.max_step_tokens=8")
    assert result.exit_code == console.EXIT_USAGE
    assert result.stderr.startswith("error: command line: scheduler.max_step_tokens: 8 rows do not hold ")
    assert "raise it to 10 " in result.stderr
    assert load_settings(None, {"scheduler.max_step_tokens": 10}).scheduler.max_step_tokens == 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tp", "0"), "command line: parallel.tp: "),
        (
            ("--tp", "2", "--ep", "3"),
            "command line: parallel: ep is 3; with dp 1 and tp 2 it is 1 (experts cut over tp) or 2",
        ),
        (("--dp", "2", "--tp", "2", "--ep", "2"), "ep is 2; with dp 2 and tp 2 it is 1 (experts cut over tp) or 4"),
        (("--set", "parallel.pp=2"), "pp is 2: pipeline parallelism is not served"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_reason(outrider, arguments, words):
    result = outrider("serve", *arguments)
    assert result.exit_code == console.EXIT_USAGE
    assert words in result.stderr
    assert result.stderr.count("error: ") == 1


def test_the_flags_of_the_layout_reach_the_settings():
    settings = settings_from_flags(None, ["parallel.dp=4"], {"tp": 2, "dp": 3, "ep": 6})
    assert (settings.parallel.tp, settings.parallel.dp, settings.parallel.ep) == (2, 3, 6)


def test_a_missing_checkpoint_is_named(outrider):
    result = outrider("serve", "/nowhere")
    assert result.exit_code == console.EXIT_USAGE
    assert "/nowhere: no such directory" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [("policy", "set", "fixed"), ("policy", "set", "off", "--gamma", "2"), ("policy", "set", "sometimes")],
)
def test_a_policy_that_makes_no_sense_is_refused_before_anyone_is_asked(outrider, arguments):
    assert outrider(*arguments).exit_code == console.EXIT_USAGE


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "x", "--seed", str(2**64)),
        ("generate", "x", "--max-tokens", str(2**32)),
        ("generate", "x", "--top-k", str(2**32)),
        ("generate", "x", "--stop-token-id", str(2**32)),
        ("policy", "set", "fixed", "--gamma", str(2**32)),
        ("policy", "set", "off", "--expected-revision", str(2**64)),
    ],
)
def test_a_number_that_no_message_holds_is_refused_before_anyone_is_asked(outrider, closed_address, arguments):
    result = outrider(*arguments, "--address", closed_address)
    assert result.exit_code == console.EXIT_USAGE
    assert "Invalid value for" in result.stderr
    *command, number = arguments
    allowed = outrider(*command, str(int(number) - 1), "--address", closed_address)
    assert allowed.exit_code == console.EXIT_UNAVAILABLE, allowed.stderr


@pytest.mark.parametrize("arguments", [("generate", "caf\udce9"), ("generate", "x", "--stop", "\udce9")])
def test_text_that_is_not_utf_8_is_one_line(outrider, closed_address, arguments):
    result = outrider(*arguments, "--address", closed_address)
    assert result.exit_code == console.EXIT_USAGE
    assert result.stderr.endswith(" is not UTF-8 text\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "address", ["", "localhost", ":50051", "localhost:", "localhost:0", "localhost:65536", "::1:50051", "[]:1", "a b:1"]
)
@pytest.mark.parametrize("command", [("policy", "get"), ("health",), ("generate", "x")])
def test_an_address_of_another_form_is_refused_before_anyone_is_asked(outrider, command, address):
    result = outrider(*command, "--address", address)
    assert result.exit_code == console.EXIT_USAGE
    assert result.stderr.startswith(f"error: --address {address!r}: not of the form host:port, ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("address", ["127.0.0.1:50051", "[::1]:1", "host.example:65535"])
def test_an_address_of_the_form_is_taken_as_it_is(address):
    assert checked_address(address) == address


def test_options_of_its_own_server_do_not_go_with_an_address(outrider, closed_address):
    result = outrider("generate", "x", "--address", closed_address, "--gamma", "2")
    assert result.exit_code == console.EXIT_USAGE
    assert "--gamma" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [("health",), ("policy", "get"), ("policy", "set", "off"), ("generate", "x"), ("generate", "x", "--show-rounds")],
)
def test_a_server_that_is_not_there_is_one_line_and_code_4(outrider, closed_address, arguments):
    result = outrider(*arguments, "--address", closed_address)
    assert result.exit_code == console.EXIT_UNAVAILABLE, result.output
    assert result.stderr.startswith("error: UNAVAILABLE: ")
    assert "Traceback" not in result.output


def test_printed_settings_load_back_as_the_defaults(outrider, tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text(outrider("settings").stdout)
    document = yaml.safe_load(path.read_text())
    assert ServeSettings.model_validate(document) == ServeSettings()
    assert load_settings(path, {}).speculation == ServeSettings().speculation


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("x"), console.EXIT_USAGE),
        (InvalidRequest("top_p", "x"), console.EXIT_USAGE),
        (LoadError("x"), console.EXIT_START),
        (OSError("x"), console.EXIT_START),
        (Unavailable("x"), console.EXIT_UNAVAILABLE),
        (InternalError("x"), console.EXIT_REFUSED),
        (grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata(), "x"), 5),
        (grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "x"), 4),
    ],
)
def test_each_error_has_its_exit_code(error, code, capsys):
    async def raises() -> None:
        raise error

    with pytest.raises(typer.Exit) as caught:
        console.run(raises())
    assert caught.value.exit_code == code
    assert capsys.readouterr().err.startswith("error: ")


def test_a_defect_of_ours_keeps_its_traceback():
    async def raises() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        console.run(raises())


def test_the_command_loads_neither_grpc_nor_ray_nor_torch_for_its_help():
    heavy = ("grpc", "google.protobuf", "ray", "torch")
    code = f"import sys, runtime.cli.main; print([name for name in {heavy} if name in sys.modules])"
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
