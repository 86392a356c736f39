"""Mutual TLS of a rank's link: whom each end takes, and what is said of files that cannot be used."""

from __future__ import annotations

import asyncio
import datetime
import os
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from fakes import echo_worker
from fakes.certificates import Authority, make_authority

from configs.access import WorkerTlsSettings
from workers import wire
from workers.certificates import CertificateProblem
from workers.channel import LOOPBACK, PLAIN, Security
from workers.client import LinkBroken, WorkerClient
from workers.terms import LinkTerms

DAY = datetime.timedelta(days=1)


def settings_of(authority: Authority, name: str = "links", server_name: str | None = None) -> WorkerTlsSettings:
    return WorkerTlsSettings(
        certificate=authority.folder / f"{name}.pem",
        key=authority.folder / f"{name}.key.pem",
        ca=authority.certificate,
        server_name=server_name,
    )


def terms_of(tls: WorkerTlsSettings) -> LinkTerms:
    return LinkTerms(secret=echo_worker.TERMS.secret, tls=tls)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    authority = make_authority(tmp_path / "ours")
    authority.issue("links", LOOPBACK)
    return authority


def step_through(server: Security, client: Security) -> None:
    """Raises LinkBroken where one end does not take the other."""

    async def run() -> None:
        served, address = echo_worker.serve(1, server)
        link = WorkerClient(address, echo_worker.TERMS, client)
        try:
            async with asyncio.timeout(10):
                await link.load(echo_worker.settings(), lambda *_: None)
                plan = echo_worker.plan(1, 1)
                assert (await link.execute(plan, wire.encode_plan(plan))).step_id == 1
        finally:
            await link.close()
            served.stop(None)

    asyncio.run(run())


def test_both_ends_with_certificates_of_one_authority_accept_each_other(authority: Authority) -> None:
    security = terms_of(settings_of(authority)).security(LOOPBACK)
    step_through(security, security)


def test_a_name_of_the_certificate_may_stand_for_every_address(authority: Authority) -> None:
    authority.issue("links", "ranks.outrider.internal")
    named = settings_of(authority, server_name="ranks.outrider.internal")
    security = terms_of(named).security(LOOPBACK)
    step_through(security, security)
    with pytest.raises(LinkBroken, match=r"cluster\.tls"):
        step_through(security, terms_of(settings_of(authority)).security(None))


def test_whoever_lacks_a_certificate_of_the_authority_is_refused_by_either_end(
    authority: Authority, tmp_path: Path
) -> None:
    ours = terms_of(settings_of(authority)).security(LOOPBACK)
    others = make_authority(tmp_path / "theirs")
    shown = others.issue("links", LOOPBACK)
    theirs = terms_of(settings_of(others)).security(LOOPBACK)
    root = authority.certificate.read_bytes()
    trusting = Security(
        channel=grpc.ssl_channel_credentials(root, shown.key.read_bytes(), shown.certificate.read_bytes())
    )
    silent = Security(channel=grpc.ssl_channel_credentials(root))
    # To our rank: one who takes us for who we are, and is of another authority or shows nothing; one in plain text.
    # From our runtime: a rank of another authority, and one in plain text.
    for server, client in ((ours, trusting), (ours, silent), (ours, PLAIN), (theirs, ours), (PLAIN, ours)):
        with pytest.raises(LinkBroken, match=r"the link to 127\.0\.0\.1:\d+ broke: "):
            step_through(server, client)


def _missing(authority: Authority) -> str:
    (authority.folder / "links.key.pem").unlink()
    return r"cluster\.tls\.key: there is no file .*links\.key\.pem; put it there"


def _unreadable(authority: Authority) -> str:
    authority.certificate.unlink()
    authority.certificate.mkdir()
    return rf"cluster\.tls\.ca: .*authority\.pem cannot be read: Is a directory; let user {os.geteuid()} read it"


def _something_else(authority: Authority) -> str:
    (authority.folder / "links.pem").write_text("hello")
    return r"cluster\.tls\.certificate: .*links\.pem holds no certificate in PEM form"


def _key_is_something_else(authority: Authority) -> str:
    (authority.folder / "links.key.pem").write_bytes((authority.folder / "links.pem").read_bytes())
    return r"cluster\.tls\.key: .*links\.key\.pem holds no private key"


def _authority_is_something_else(authority: Authority) -> str:
    authority.certificate.write_bytes((authority.folder / "links.key.pem").read_bytes())
    return r"cluster\.tls\.ca: .*authority\.pem holds no certificates in PEM form"


def _damaged(authority: Authority) -> str:
    whole = (authority.folder / "links.pem").read_text().splitlines()
    (authority.folder / "links.pem").write_text("\n".join([*whole[:3], *whole[4:]]))
    return r"cluster\.tls\.certificate: .*links\.pem and .*links\.key\.pem are damaged"


def _mismatched(authority: Authority) -> str:
    other = authority.issue("other", LOOPBACK)
    other.key.rename(authority.folder / "links.key.pem")
    return r"cluster\.tls\.key: .*links\.key\.pem is not the key of .*links\.pem; put the two"


def _encrypted(authority: Authority) -> str:
    authority.issue("links", LOOPBACK, passphrase=b"sesame")
    return r"cluster\.tls\.key: .*links\.key\.pem asks for a passphrase"


def _expired(authority: Authority) -> str:
    authority.issue("links", LOOPBACK, begins=-3 * DAY, ends=-DAY)
    return r"cluster\.tls\.certificate: .*links\.pem has expired; renew it"


def _too_early(authority: Authority) -> str:
    authority.issue("links", LOOPBACK, begins=DAY)
    return r"cluster\.tls\.certificate: .*links\.pem is not valid yet; renew it, or check this machine's clock"


def _for_servers_alone(authority: Authority) -> str:
    authority.issue("links", LOOPBACK, purposes=[ExtendedKeyUsageOID.SERVER_AUTH])
    return r"cluster\.tls\.certificate: .*links\.pem is not for both servers and clients; .* serverAuth and clientAuth"


def _of_another_authority(authority: Authority) -> str:
    other = make_authority(authority.folder / "other")
    authority.certificate.write_bytes(other.certificate.read_bytes())
    return (
        r"cluster\.tls\.certificate: .*links\.pem is not of the authority in .*authority\.pem .*; set cluster\.tls\.ca"
    )


def _under_another_name(authority: Authority) -> str:
    authority.issue("links", "192.0.2.1", "elsewhere")
    return r"cluster\.tls\.certificate: .*links\.pem does not bear the name 127\.0\.0\.1; .* cluster\.tls\.server_name"


@pytest.mark.parametrize(
    "spoil",
    [
        *(_missing, _unreadable, _something_else, _key_is_something_else, _authority_is_something_else, _damaged),
        *(_mismatched, _encrypted, _expired, _too_early, _for_servers_alone, _of_another_authority),
        _under_another_name,
    ],
)
def test_files_that_cannot_be_used_are_named_with_setting_and_remedy(
    authority: Authority, spoil: Callable[[Authority], str]
) -> None:
    text = spoil(authority)
    with pytest.raises(CertificateProblem, match=text):
        terms_of(settings_of(authority)).security(LOOPBACK)


def test_relative_paths_start_where_the_runtime_stands(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(authority.folder)
    tls = WorkerTlsSettings(certificate=Path("links.pem"), key=Path("links.key.pem"), ca=Path("authority.pem"))
    terms = LinkTerms.fresh(tls)
    monkeypatch.chdir("/")
    assert terms.security(LOOPBACK).server is not None
