"""Identities over gRPC: a changed file under a running server, and client certificates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from fakes.certificates import Authority, make_authority
from fakes.front import in_loop, request_for, serving, status_of
from fakes.identities import TOKENS, as_, audited, by_role, digest, entry, guarded, write_identities
from gateway.vllm_face import message_for
from grpc_health.v1 import health_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from runtime.front.client import OutriderClient
from runtime.front.credentials import Credentials

Code = grpc.StatusCode


@in_loop
async def test_a_changed_file_is_in_force_for_the_next_call_and_ends_those_of_who_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "identities.yaml"
    async with guarded(tmp_path) as front:
        [watched] = front.server.watched
        async with (
            as_("observe", front.address) as observer,
            as_("operate", front.address) as operator,
            OutriderClient(front.address, Credentials(token="new")) as client,
        ):
            watches = [observer.watch_policy(), operator.watch_policy()]
            for watch in watches:
                await watch.read()
            # The observer is gone, the operator has a new token and but observes.
            write_identities(path, entry("operate", "observe", token_sha256=digest("new")))
            assert watched.check()
            assert await watches[0].code() is Code.UNAUTHENTICATED
            assert await watches[0].details() == "observe is no longer known to this server"
            code, _ = await status_of(operator.get_status())
            assert code is Code.UNAUTHENTICATED
            await client.get_status()
            code, _ = await status_of(client.drain())
            assert code is Code.PERMISSION_DENIED
            # The call that began with the old token goes on, until its role is gone.
            assert not watches[1].done()
            write_identities(path, entry("operate", "generate", token_sha256=digest("new")))
            assert watched.check()
            assert await watches[1].code() is Code.PERMISSION_DENIED
            path.write_text("identities: [")
            assert not watched.check()
            await client.get_model()
    assert [line["act"] for line in audited(tmp_path)].count("ReloadIdentities") == 2


@in_loop
async def test_a_stream_of_who_is_gone_ends_and_is_aborted(tmp_path: Path) -> None:
    path = by_role(tmp_path / "identities.yaml")
    settings = {"access.identities": path}
    async with serving(
        steps_by_itself=False, settings=settings, credentials=Credentials(token=TOKENS["generate"])
    ) as front:
        call = front.client.call(request_for(max_tokens=60))
        await front.engine.until(lambda: bool(front.engine.live))
        front.engine.step()
        assert (await call.read()).token_ids
        write_identities(path, entry("other", "generate", token_sha256=digest("x")))
        [watched] = front.server.watched
        assert watched.check()
        assert await call.code() is Code.UNAUTHENTICATED
        assert await call.details() == "generate is no longer known to this server"
        await front.engine.until(lambda: not front.engine.live)
        assert len(front.engine.aborted) == 1


@in_loop
async def test_who_is_gone_before_the_message_came_is_not_served(tmp_path: Path) -> None:
    async with guarded(tmp_path) as front, as_("operate", front.address) as client:

        async def endless() -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        begun = client.channel.stream_unary("/outrider.v1.OperatorService/Drain")(endless())
        while not front.server.entrance.guard._running:
            await asyncio.sleep(0.01)
        write_identities(tmp_path / "identities.yaml", entry("other", "operate", token_sha256=digest("x")))
        [watched] = front.server.watched
        assert watched.check()
        assert await status_of(begun) == (Code.UNAUTHENTICATED, "operate is no longer known to this server")
    assert [(line["act"], line["outcome"]) for line in audited(tmp_path)] == [
        ("ReloadIdentities", "OK"),
        ("Drain", "UNAUTHENTICATED"),
    ]


@in_loop
async def test_an_abort_of_a_gateway_ends_its_own_requests_alone(tmp_path: Path) -> None:
    gateways = [entry(name, "generate", token_sha256=digest(name)) for name in ("one", "two")]
    path = write_identities(tmp_path / "identities.yaml", *gateways)
    async with (
        serving(steps_by_itself=False, settings={"access.identities": path}) as front,
        OutriderClient(front.address, Credentials(token="one")) as one,
        OutriderClient(front.address, Credentials(token="two")) as two,
    ):
        first, second = (vllm_grpc.VllmEngineStub(client.channel) for client in (one, two))
        call = first.Generate(message_for(request_id="mine", max_tokens=3))
        await front.engine.until(lambda: bool(front.engine.live))
        await second.Abort(vllm.AbortRequest(request_ids=["mine", "to come"]))
        front.engine.step()
        assert [frame async for frame in call][-1].complete.finish_reason == "length"
        call = first.Generate(message_for(request_id="to come"))
        await front.engine.until(lambda: bool(front.engine.live))
        await first.Abort(vllm.AbortRequest(request_ids=["to come"]))
        assert [frame async for frame in call][-1].complete.finish_reason == "abort"


def client_of(authority: Authority, name: str, *san: str) -> Credentials:
    issued = authority.issue(name, *san)
    return Credentials(ca=authority.certificate, certificate=issued.certificate, key=issued.key)


@in_loop
async def test_client_certificates_name_identities_and_a_token_goes_before_them(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "pki")
    server = authority.issue("front")
    identities = write_identities(
        tmp_path / "identities.yaml",
        entry("by-uri", "generate", certificate="spiffe://example/gateway"),
        entry("by-dns", "observe", certificate="watcher.example"),
        entry("by-cn", "operate", certificate="Ada Lovelace", token_sha256=digest("ada")),
    )
    settings = {
        "access.identities": identities,
        "server.tls.certificate": server.certificate,
        "server.tls.key": server.key,
        "server.tls.client_ca": authority.certificate,
    }
    async with serving(settings=settings, credentials=client_of(authority, "gw", "spiffe://example/gateway")) as front:
        frames = [frame async for frame in front.client.generate(request_for(max_tokens=3))]
        assert frames
        assert front.engine.submitted[0].origin.identity == "by-uri"
        async with OutriderClient(front.address, client_of(authority, "w", "watcher.example")) as client:
            await client.get_status()
            code, text = await status_of(client.drain())
            assert (code, "by-dns has observe" in text) == (Code.PERMISSION_DENIED, True)
        ada = client_of(authority, "Ada Lovelace")
        async with OutriderClient(front.address, ada) as client:
            await client.drain()
        async with OutriderClient(front.address, client_of(authority, "mallory")) as client:
            code, text = await status_of(client.get_status())
            assert (code, "mallory" in text) == (Code.UNAUTHENTICATED, True)
            assert await client.check_health("") == health_pb2.HealthCheckResponse.SERVING
        with_token = Credentials(ca=ada.ca, certificate=ada.certificate, key=ada.key, token="wrong")
        async with OutriderClient(front.address, with_token) as client:
            code, _ = await status_of(client.get_status())
            assert code is Code.UNAUTHENTICATED, "a wrong token is not made good by a certificate"
        both = client_of(authority, "w2", "watcher.example")
        async with OutriderClient(
            front.address, Credentials(ca=both.ca, certificate=both.certificate, key=both.key, token="ada")
        ) as client:
            await client.resume()
