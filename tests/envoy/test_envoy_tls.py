"""Mutual TLS before and behind Envoy: who is let in, whom it trusts, and certificates that change while it runs."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from fakes.certificates import Authority, Issued, make_authority
from fakes.envoy import SHIPPED, Envoy, running_envoy
from fakes.front import Front, in_loop, request_for, serving, status_of
from fakes.http import asking

from runtime.front.client import OutriderClient
from runtime.front.credentials import Credentials


@dataclass(frozen=True, slots=True)
class Home:
    """A copy of deploy/envoy with certificates of three authorities: Envoy's own, its clients' and the replicas'."""

    folder: Path
    envoys: Authority
    clients: Authority
    replicas: Authority

    def credentials(self, shown: Issued | None) -> Credentials:
        """Of a client that trusts the listener."""
        ca = self.envoys.certificate
        return Credentials(ca=ca) if shown is None else Credentials(ca=ca, certificate=shown.certificate, key=shown.key)

    def context(self, shown: Issued) -> ssl.SSLContext:
        """The same for HTTP/1.1."""
        context = ssl.create_default_context(cafile=self.envoys.certificate)
        context.load_cert_chain(shown.certificate, shown.key)
        return context

    def place(self, pair: Issued, name: str) -> None:
        """Moves a pair into Envoy's folder, as what renews certificates does."""
        for path, place in ((pair.key, f"{name}.key.pem"), (pair.certificate, f"{name}.pem")):
            shutil.copy(path, self.folder / "next")
            (self.folder / "next").rename(self.folder / "certificates" / place)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    folder = tmp_path / "envoy"
    shutil.copytree(SHIPPED, folder)
    (folder / "certificates").mkdir()
    made = Home(folder, *(make_authority(tmp_path / name, name) for name in ("envoys", "clients", "replicas")))
    shutil.copy(made.clients.certificate, folder / "certificates" / "clients-ca.pem")
    shutil.copy(made.replicas.certificate, folder / "certificates" / "replicas-ca.pem")
    made.place(made.envoys.issue("listener"), "listener")
    made.place(made.envoys.issue("gateway", "outrider-gateway"), "envoy")
    return made


@asynccontextmanager
async def behind_tls(
    home: Home, shown: Issued | None = None, settings: Mapping[str, Any] | None = None
) -> AsyncIterator[tuple[Front, Envoy]]:
    """A front that takes Envoy's certificates alone. shown: its own; that of mtls.yaml's name if left out."""
    shown = shown or home.replicas.issue("front", "outrider", "127.0.0.1")
    tls = {
        "server.tls.certificate": str(shown.certificate),
        "server.tls.key": str(shown.key),
        "server.tls.client_ca": str(home.envoys.certificate),
    }
    gateway = home.envoys.issue("front-client")
    own = Credentials(ca=home.replicas.certificate, certificate=gateway.certificate, key=gateway.key)
    async with (
        serving(settings={**tls, **(settings or {})}, credentials=own) as front,
        running_envoy(home.folder.parent, [front.address], name="mtls.yaml", home=home.folder) as envoy,
    ):
        yield front, envoy


@in_loop
async def test_a_client_with_a_certificate_reaches_outrider_by_grpc_and_json(home):
    shown = home.clients.issue("ada")
    async with behind_tls(home) as (front, envoy), OutriderClient(envoy.address, home.credentials(shown)) as client:
        frames = [frame async for frame in client.generate(request_for(max_tokens=3))]
        assert [list(frame.token_ids) for frame in frames] == [[65, 66, 67]]
        line = await envoy.log.get()
        assert (line["certificate"], line["grpc_status"]) == ("CN=ada", "OK")
        async with asking("GET", envoy.address, "/v1/model", tls=home.context(shown)) as answer:
            assert (await answer.json())["name"] == "demo"
        assert await envoy.replicas() == {front.address: True}, "health is asked by mutual TLS, too"


@in_loop
async def test_others_are_refused(home):
    strangers = {
        "without a certificate": home.credentials(None),
        "with one of another authority": home.credentials(home.replicas.issue("eve")),
        "in plain text": None,
    }
    async with behind_tls(home) as (front, envoy):
        for name, credentials in strangers.items():
            async with OutriderClient(envoy.address, credentials) as client:
                code, _ = await status_of(client.call(request_for()))
            assert code is grpc.StatusCode.UNAVAILABLE, name
        assert not front.engine.submitted


@pytest.mark.parametrize("wrong", ["name", "authority"])
@in_loop
async def test_envoy_sends_nothing_to_who_cannot_prove_to_be_outrider(home, wrong):
    shown = (
        home.replicas.issue("other", "another-service", "127.0.0.1")
        if wrong == "name"
        else home.clients.issue("other", "outrider", "127.0.0.1")
    )
    credentials = home.credentials(home.clients.issue("ada"))
    async with behind_tls(home, shown) as (front, envoy), OutriderClient(envoy.address, credentials) as client:
        assert await envoy.replicas() == {front.address: False}
        code, text = await status_of(client.call(request_for()))
        assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "no healthy upstream")
        assert (await envoy.statistics())["ssl.handshake"] == 0


@in_loop
async def test_new_certificates_are_taken_while_streams_run(home):
    shown = home.clients.issue("ada")
    async with behind_tls(home) as (_, envoy), OutriderClient(envoy.address, home.credentials(shown)) as client:
        before = await certificate_of(envoy, home, shown)
        home.place(home.envoys.issue("listener"), "listener")
        while await certificate_of(envoy, home, shown) == before:
            await asyncio.sleep(0.02)
        assert [len(frame.token_ids) async for frame in client.generate(request_for(max_tokens=3))] == [3]


async def certificate_of(envoy: Envoy, home: Home, shown: Issued) -> bytes:
    """What the listener shows to a new connection."""
    host, port = envoy.address.split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=home.context(shown), server_hostname=host)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


@pytest.mark.parametrize("envoy_may_generate", [False, True])
@in_loop
async def test_who_calls_is_told_by_the_token_that_passes_through(home, tmp_path, envoy_may_generate):
    """The certificate that Outrider sees is Envoy's, which speaks for callers without a token where it is known."""
    identities = tmp_path / "identities.yaml"
    entries = [{"name": "ada", "roles": ["generate"], "token_sha256": hashlib.sha256(b"secret").hexdigest()}]
    if envoy_may_generate:
        entries.append({"name": "gateway", "roles": ["generate"], "certificate": "outrider-gateway"})
    identities.write_text(yaml.safe_dump({"identities": entries}))
    shown = home.clients.issue("ada")
    async with behind_tls(home, settings={"access.identities": str(identities)}) as (front, envoy):
        for token, status in (("secret", 200), ("guessed", 401), (None, 200 if envoy_may_generate else 401)):
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            body = {"token_ids": {"ids": [1]}, "stopping": {"max_tokens": 1}}
            asked = asking("POST", envoy.address, "/v1/generate", body, headers=headers, tls=home.context(shown))
            async with asked as answer:
                assert answer.status == status, token
                assert status == 200 or (await answer.json())["code"] == 16
        names = [request.origin.identity for request in front.engine.submitted]
        assert names == (["ada", "gateway"] if envoy_may_generate else ["ada"])
        assert await envoy.replicas() == {front.address: True}, "health is open to it"
