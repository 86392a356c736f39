"""Credentials of the commands: from flags and the environment, to every server that is asked, and never shown."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from fakes.certificates import make_authority
from fakes.commands import Outrider, outrider_in_loop
from fakes.front import Front, in_loop, request_for, serving
from typer.testing import CliRunner

from runtime.cli import console
from runtime.cli.main import app
from runtime.front.credentials import Credentials

VARIABLES = ("OUTRIDER_CA", "OUTRIDER_CERT", "OUTRIDER_KEY", "OUTRIDER_TOKEN_FILE", "OUTRIDER_TOKEN")
TOKEN = "the-token-of-ada"

COMMANDS = [
    ("status",),
    ("requests",),
    ("top", "--count", "1", "--interval-s", "0.1"),
    ("policy", "get"),
    ("policy", "set", "off"),
    ("policy", "shadow", "show"),
    ("abort", "nobody"),
    ("check",),
    ("drain", "--no-wait"),
    ("resume",),
    ("health",),
]


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch) -> Outrider:
    return outrider_in_loop(monkeypatch)


@asynccontextmanager
async def locked(tmp_path: Path, **more: object) -> AsyncIterator[tuple[Front, list[str]]]:
    """A front with TLS that knows one token; and the flags that open it."""
    authority = make_authority(tmp_path)
    issued = authority.issue("front")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    entry = {
        "name": "ada",
        "roles": ["operate", "generate"],
        "token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest(),
    }
    (tmp_path / "identities.yaml").write_text(yaml.safe_dump({"identities": [entry]}))
    settings = {
        "server.tls.certificate": issued.certificate,
        "server.tls.key": issued.key,
        "access.identities": tmp_path / "identities.yaml",
        **more,
    }
    flags = ["--ca", str(authority.certificate), "--token-file", str(tmp_path / "token")]
    async with serving(settings=settings, credentials=Credentials(ca=authority.certificate, token=TOKEN)) as front:
        yield front, flags


@in_loop
async def test_every_command_takes_them(outrider: Outrider, tmp_path: Path) -> None:
    async with locked(tmp_path) as (front, flags):
        for command in COMMANDS:
            done = await outrider(*flags, *command, "--address", front.address)
            if command[0] == "abort":
                assert "nobody: not live" in done.output
            else:
                assert (command, done.exit_code) == (command, 0), done.output
            assert TOKEN not in done.output
        done = await outrider(*flags, "generate", "x", "--max-tokens", "3", "--address", front.address)
        assert done.exit_code == 0, done.output
        assert front.engine.submitted[-1].origin.identity == "ada"


@in_loop
async def test_the_environment_says_them_too(
    outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with locked(tmp_path) as (front, flags):
        monkeypatch.setenv("OUTRIDER_CA", flags[1])
        done = await outrider("status", "--address", front.address)
        assert (done.exit_code, "UNAUTHENTICATED" in done.output) == (console.EXIT_REFUSED, True)
        assert "--token-file" in done.output
        monkeypatch.setenv("OUTRIDER_TOKEN", TOKEN)
        assert (await outrider("status", "--address", front.address)).exit_code == 0
        # A file goes before it.
        (tmp_path / "wrong").write_text("another-token")
        monkeypatch.setenv("OUTRIDER_TOKEN_FILE", str(tmp_path / "wrong"))
        done = await outrider("status", "--address", front.address)
        assert done.exit_code == console.EXIT_REFUSED
        assert "another-token" not in done.output
        done = await outrider("--token-file", flags[3], "status", "--address", front.address)
        assert done.exit_code == 0


@in_loop
async def test_health_asks_over_mutual_tls_and_without_a_token(outrider: Outrider, tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    issued, probe = authority.issue("front"), authority.issue("probe")
    settings = {
        "server.tls.certificate": issued.certificate,
        "server.tls.key": issued.key,
        "server.tls.client_ca": authority.certificate,
    }
    shown = Credentials(ca=authority.certificate, certificate=probe.certificate, key=probe.key)
    async with serving(settings=settings, credentials=shown) as front:
        ask = ("health", "--service", "outrider.v1.InferenceService", "--address", front.address)
        flags = ("--ca", str(authority.certificate), "--cert", str(probe.certificate), "--key", str(probe.key))
        done = await outrider(*flags, *ask)
        assert (done.exit_code, done.output) == (0, "SERVING\n")
        front.engine.set_serving(False)
        assert (await outrider(*flags, *ask)).exit_code == console.EXIT_NO
        done = await outrider(*flags[:2], *ask, "--timeout-s", "5")
        assert done.exit_code == console.EXIT_UNAVAILABLE
        done = await outrider(*ask, "--timeout-s", "5")
        assert done.exit_code == console.EXIT_UNAVAILABLE


@in_loop
async def test_a_server_of_tls_that_is_spoken_to_in_plain_text_is_hinted_at(outrider: Outrider, tmp_path: Path) -> None:
    async with locked(tmp_path) as (front, _):
        done = await outrider("status", "--address", front.address)
        assert (done.exit_code, "--ca" in done.output) == (console.EXIT_UNAVAILABLE, True), done.output


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--ca", "gone.pem"], "--ca: there is no file gone.pem"),
        (["--ca", "junk"], "--ca: junk holds no certificates"),
        (["--cert", "a.pem"], "--key is not set, but --cert is; set both, or neither"),
        (["--key", "a.pem", "--ca", "authority.pem"], "--cert is not set, but --key is"),
        (["--cert", "a.pem", "--key", "a.key.pem"], "--ca is not set, but --cert and --key are"),
        (
            ["--ca", "authority.pem", "--cert", "a.pem", "--key", "b.key.pem"],
            "--key: b.key.pem is not the key of a.pem",
        ),
        (["--ca", "authority.pem", "--cert", "junk", "--key", "b.key.pem"], "--cert: junk holds no certificate"),
        (["--token-file", "gone"], "--token-file gone: No such file"),
        (["--token-file", "empty"], "--token-file empty: holds no token"),
        (["--token-file", "two"], "--token-file two: holds no token"),
        (["--token-file", "binary"], "--token-file binary: not text"),
    ],
)
def test_what_cannot_be_used_is_told_in_the_words_of_the_command_line(
    flags: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = make_authority(tmp_path)
    for name in ("a", "b"):
        authority.issue(name)
    (tmp_path / "junk").write_text("junk")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "two").write_text("secret-one\nsecret-two\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*flags, "status", "--address", "127.0.0.1:1", "--timeout-s", "1"])
    assert (done.exit_code, told in done.output) == (console.EXIT_USAGE, True), done.output
    assert "secret-one" not in done.output


@pytest.mark.parametrize("command", [(), ("status",), ("serve",), ("generate",), ("bench", "run")])
def test_help_shows_no_secret(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_TOKEN", TOKEN)
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("OUTRIDER_TOKEN_FILE", str(tmp_path / "token"))
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0
    assert TOKEN not in done.output


def test_a_token_has_no_flag() -> None:
    assert "--token " not in CliRunner().invoke(app, ["--help"]).output
    assert TOKEN not in repr(Credentials(token=TOKEN))


def test_a_token_is_not_sent_before_the_servers_certificate_is_known_to_be_good(tmp_path: Path) -> None:
    @in_loop
    async def scenario() -> None:
        stranger = make_authority(tmp_path / "stranger")
        issued = stranger.issue("front")
        settings = {"server.tls.certificate": issued.certificate, "server.tls.key": issued.key}
        ours = make_authority(tmp_path / "ours")
        async with serving(settings=settings, credentials=Credentials(ca=ours.certificate, token=TOKEN)) as front:
            call = front.client.call(request_for())
            assert (await call.code()).name == "UNAVAILABLE"
            assert not front.engine.submitted

    scenario()
