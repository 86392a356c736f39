"""TLS of the ports: who is let in, certificates that change under a running server, and what is warned of at start."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import grpc
import pytest
from fakes.certificates import DAY, Issued, make_authority
from fakes.front import Front, in_loop, request_for, serving, status_of
from grpc_health.v1 import health_pb2

from configs.load import SettingsError, load_settings
from configs.schema import ServeSettings
from runtime.front.client import OutriderClient
from runtime.front.credentials import Credentials
from runtime.front.entrance import Entrance
from runtime.front.health import INFERENCE

Code = grpc.StatusCode
Status = health_pb2.HealthCheckResponse


def tls_of(issued: Issued, port: str = "server", client_ca: Path | None = None) -> dict[str, Path]:
    chosen = {f"{port}.tls.certificate": issued.certificate, f"{port}.tls.key": issued.key}
    return chosen if client_ca is None else {**chosen, f"{port}.tls.client_ca": client_ca}


async def is_let_in(address: str, credentials: Credentials | None) -> bool:
    async with OutriderClient(address, credentials) as client:
        call = client.channel.unary_unary("/outrider.v1.InferenceService/GetModel")(b"")
        code = await call.code()
    assert code in (Code.OK, Code.UNAVAILABLE)
    return code is Code.OK


@in_loop
async def test_tls_keeps_plain_text_and_strangers_out(tmp_path: Path) -> None:
    authority, stranger = make_authority(tmp_path / "ours"), make_authority(tmp_path / "theirs")
    ours = Credentials(ca=authority.certificate)
    async with serving(settings=tls_of(authority.issue("front")), credentials=ours) as front:
        frames = [frame async for frame in front.client.generate(request_for(max_tokens=3))]
        assert sum(len(frame.token_ids) for frame in frames) == 3
        assert not await is_let_in(front.address, None)
        assert not await is_let_in(front.address, Credentials(ca=stranger.certificate))


@in_loop
async def test_probes_that_do_no_tls_have_a_port_that_answers_health_and_nothing_else(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    ours = authority.issue("front")
    shown = Credentials(ca=authority.certificate, certificate=ours.certificate, key=ours.key)
    settings = {**tls_of(ours, client_ca=authority.certificate), "server.health_port": 0}
    async with serving(settings=settings, credentials=shown) as front:
        assert front.server.health_address not in (None, front.address)
        async with OutriderClient(front.server.health_address or "") as probe:
            assert await probe.check_health("") == await probe.check_health(INFERENCE) == Status.SERVING
            front.engine.set_serving(False)
            assert [await probe.check_health(service) for service in ("", INFERENCE)] == [
                Status.SERVING,
                Status.NOT_SERVING,
            ]
            assert (await status_of(probe.call(request_for())))[0] is Code.UNIMPLEMENTED
            reading = probe.channel.unary_unary("/outrider.v1.OperatorService/GetStatus")(b"")
            assert (await status_of(reading))[0] is Code.UNIMPLEMENTED
            asked = probe.channel.unary_unary("/grpc.health.v1.Health/Check")
            assert (await status_of(asked(b"\xff\xff")))[0] is Code.INVALID_ARGUMENT
            assert (await status_of(asked(b"\x0a" + b"x" * 10_000)))[0] is Code.RESOURCE_EXHAUSTED
    async with serving() as plain:
        assert plain.server.health_address is None


@in_loop
async def test_mutual_tls_asks_for_a_certificate_of_its_authority(tmp_path: Path) -> None:
    authority, stranger = make_authority(tmp_path / "ours"), make_authority(tmp_path / "theirs")

    def shown(issued: Issued) -> Credentials:
        return Credentials(ca=authority.certificate, certificate=issued.certificate, key=issued.key)

    settings = tls_of(authority.issue("front"), client_ca=authority.certificate)
    async with serving(settings=settings, credentials=shown(authority.issue("client"))) as front:
        assert (await front.client.get_model()).name == "demo"
        assert not await is_let_in(front.address, Credentials(ca=authority.certificate))
        assert not await is_let_in(front.address, shown(stranger.issue("client")))
        assert not await is_let_in(front.address, shown(authority.issue("late", begins=-2 * DAY, ends=-DAY)))


@in_loop
async def test_operators_own_port_has_its_own_certificate_or_the_public_one(tmp_path: Path) -> None:
    public, operators = make_authority(tmp_path / "public"), make_authority(tmp_path / "operators")
    settings = {**tls_of(public.issue("front")), "operator.port": 0}
    own = tls_of(operators.issue("operator"), "operator", operators.certificate)
    of_public = Credentials(ca=public.certificate)
    async with (
        serving(settings=settings, credentials=of_public) as front,
        OutriderClient(front.server.operator_address, of_public) as client,
    ):
        assert (await client.get_status()).model.name == "demo"
    ada = operators.issue("ada")
    async with serving(settings={**settings, **own}, credentials=of_public) as front:
        assert (await front.client.get_model()).name == "demo"
        address = front.server.operator_address
        async with OutriderClient(
            address, Credentials(ca=operators.certificate, certificate=ada.certificate, key=ada.key)
        ) as client:
            assert (await client.get_status()).model.name == "demo"
        for too_little in (of_public, Credentials(ca=operators.certificate), None):
            async with OutriderClient(address, too_little) as client:
                code, _ = await status_of(client.get_status())
                assert code is Code.UNAVAILABLE


def replace_pair(kept: Issued, new: Issued) -> None:
    shutil.copyfile(new.certificate, kept.certificate)
    shutil.copyfile(new.key, kept.key)


async def check(front: Front) -> list[bool]:
    return [watched.check() for watched in front.server.watched]


@in_loop
async def test_new_certificates_are_shown_without_a_restart_and_streams_go_on(tmp_path: Path) -> None:
    old, new = make_authority(tmp_path / "old"), make_authority(tmp_path / "new")
    kept = old.issue("front")
    settings = tls_of(kept)
    by_old, by_new = Credentials(ca=old.certificate), Credentials(ca=new.certificate)
    async with serving(steps_by_itself=False, settings=settings, credentials=by_old) as front:
        call = front.client.call(request_for(max_tokens=6))
        await front.engine.until(lambda: bool(front.engine.live))
        front.engine.step()
        assert await check(front) == [False]
        replace_pair(kept, new.issue("front"))
        assert await check(front) == [True]
        assert await is_let_in(front.address, by_new)
        assert not await is_let_in(front.address, by_old)
        # The connection of before is as it was.
        front.engine.step()
        assert sum([len(frame.token_ids) async for frame in call]) == 6
        # One that cannot be used changes nothing.
        kept.key.write_bytes(old.issue("other").key.read_bytes())
        assert await check(front) == [False]
        assert await is_let_in(front.address, by_new)
        replace_pair(kept, new.issue("late", begins=-2 * DAY, ends=-DAY))
        assert await check(front) == [False]
        assert await is_let_in(front.address, by_new)
        # And a good one after it is taken.
        replace_pair(kept, old.issue("again"))
        assert await check(front) == [True]
        assert await is_let_in(front.address, by_old)


@in_loop
async def test_whose_certificates_are_taken_changes_too(tmp_path: Path) -> None:
    first, second = make_authority(tmp_path / "first"), make_authority(tmp_path / "second")
    trusted = tmp_path / "trusted.pem"
    shutil.copyfile(first.certificate, trusted)

    def of(authority_name: str) -> Credentials:
        issued = {"first": first, "second": second}[authority_name].issue(authority_name)
        return Credentials(ca=first.certificate, certificate=issued.certificate, key=issued.key)

    async with serving(settings=tls_of(first.issue("front"), client_ca=trusted), credentials=of("first")) as front:
        assert not await is_let_in(front.address, of("second"))
        trusted.write_bytes(first.certificate.read_bytes() + second.certificate.read_bytes())
        assert await check(front) == [True]
        assert await is_let_in(front.address, of("second"))
        assert await is_let_in(front.address, of("first"))
        shutil.copyfile(second.certificate, trusted)
        assert await check(front) == [True]
        assert not await is_let_in(front.address, of("first"))


@pytest.mark.parametrize("port", ["server", "operator"])
def test_a_wrong_file_is_told_before_the_port_listens(port: str, tmp_path: Path) -> None:
    @in_loop
    async def scenario() -> None:
        front, other = make_authority(tmp_path).issue("front"), make_authority(tmp_path / "x").issue("other")
        settings = {f"{port}.tls.certificate": front.certificate, f"{port}.tls.key": other.key, "operator.port": 0}
        with pytest.raises(SettingsError, match=rf"{port}\.tls\.key: .* is not the key of "):
            async with serving(settings=settings):
                raise AssertionError("it serves")

    scenario()


def test_the_links_certificate_is_told_of_before_the_ranks_need_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = make_authority(tmp_path)
    pair = authority.issue("links", ends=3 * DAY)
    settings = settings_with(
        cluster__tls__certificate=pair.certificate, cluster__tls__key=pair.key, cluster__tls__ca=authority.certificate
    )
    entrance = Entrance(settings)
    [watched], [before] = entrance.watched, entrance.status()
    assert before.what == "certificates of cluster.tls"
    authority.issue("links", ends=9 * DAY)
    with caplog.at_level(logging.INFO):
        assert watched.check()
    assert caplog.messages[-1] == "certificates of cluster.tls changed and will be used from the ranks' next start on"
    after = entrance.status()[0]
    assert before.expires_at is not None
    assert after.expires_at is not None
    assert (after.expires_at - before.expires_at) / 86400 == pytest.approx(6, abs=0.1)
    authority.issue("links", begins=-2 * DAY, ends=-DAY)
    assert not watched.check()
    assert "cluster.tls.certificate" in caplog.messages[-1]
    assert entrance.status()[0].is_refused
    with pytest.raises(SettingsError, match=r"cluster\.tls\.certificate: .* expired"):
        Entrance(settings)


def settings_with(**given: object) -> ServeSettings:
    return load_settings(None, {key.replace("__", "."): value for key, value in given.items()})


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({}, ""),
        ({"server__host": "localhost"}, ""),
        ({"server__host": "::1"}, ""),
        ({"server__host": "0.0.0.0"}, "operators share server.port on 0.0.0.0 and access.identities is unset"),
        ({"server__host": "::"}, "operators share server.port on :: and"),
        ({"server__host": "outrider.example"}, "operators share server.port on outrider.example"),
        ({"server__host": "0.0.0.0", "operator__port": 50053}, ""),
        ({"server__host": "0.0.0.0", "access__identities": "identities.yaml"}, "is served in plain text"),
        ({"access__identities": "identities.yaml"}, ""),
        (
            {"operator__host": "0.0.0.0", "operator__port": 50053, "access__identities": "identities.yaml"},
            "access.identities is set and 0.0.0.0 is served in plain text",
        ),
    ],
)
def test_what_is_unwise_is_warned_of(given, warned, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "identities.yaml").write_text("identities: [{name: a, roles: [operate], certificate: a}]")
    with caplog.at_level(logging.WARNING):
        Entrance(settings_with(**given))
    assert [warned in line for line in caplog.messages] == ([True] if warned else [])


def test_relative_paths_in_a_file_start_at_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "access: {identities: a.yaml, audit_log: audit.jsonl}\n"
        "server: {tls: {certificate: tls.crt, key: tls.key, client_ca: ca.crt}}\n"
        "operator: {port: 1, tls: {certificate: o.crt, key: o.key}}\n"
    )
    settings = load_settings(path, {})
    assert settings.access.identities == tmp_path / "a.yaml"
    assert settings.access.audit_log == tmp_path / "audit.jsonl"
    assert settings.server.tls.client_ca == tmp_path / "ca.crt"
    assert settings.operator.tls.key == tmp_path / "o.key"
