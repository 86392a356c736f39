"""Who may make which call: tokens and client certificates, roles, and what is written of refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.front import in_loop, request_for, serving, status_of
from fakes.identities import as_, audited, digest, guarded
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.v1 import inference_pb2, operator_pb2
from runtime.access.identity import Role
from runtime.access.roles import READING, role_for
from runtime.front.client import OutriderClient

Code = grpc.StatusCode
OPERATOR = "outrider.v1.OperatorService"
RPCS = {method.name: method for method in operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].methods}
INFERENCE_RPCS = {
    method.name: method for method in inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods
}
READERS = {"GetVerificationPolicy", "WatchVerificationPolicy", "AdvisePolicy", "GetStatus", "ListRequests"}


def call_by_path(client: OutriderClient, path: str, message: bytes = b"", is_stream: bool = False) -> Any:
    return (client.channel.unary_stream if is_stream else client.channel.unary_unary)(path)(message, timeout=5)


def test_every_rpc_has_a_role_and_reading_ones_are_named() -> None:
    assert {name for name in RPCS if role_for(f"/{OPERATOR}/{name}") is Role.OBSERVE} == READERS
    assert {role_for(f"/{OPERATOR}/{name}") for name in set(RPCS) - READERS} == {Role.OPERATE}
    assert {path.rpartition("/")[2] for path in READING} == READERS <= set(RPCS), "no name is a mistake"
    for name in INFERENCE_RPCS:
        assert role_for(f"/outrider.v1.InferenceService/{name}") is Role.GENERATE
    assert role_for("/vllm.grpc.engine.VllmEngine/Abort") is Role.GENERATE
    assert role_for("/grpc.health.v1.Health/Check") is None
    for odd in ("/some.New/Rpc", "", "/", f"//{OPERATOR}/Drain", f"{OPERATOR}/Drain", f"/{OPERATOR}/GetStatus/"):
        assert role_for(odd) is Role.OPERATE


@pytest.mark.parametrize("name", RPCS)
def test_an_operator_rpc_is_for_its_roles_alone(name: str, tmp_path: Path) -> None:
    @in_loop
    async def scenario() -> None:
        async with guarded(tmp_path) as front:
            front.engine.drain()
            before = front.engine.status()
            allowed = {"observe", "operate"} if name in READERS else {"operate"}
            for holder in ("generate", "observe", "nobody", None):
                if holder in allowed:
                    continue
                client = OutriderClient(front.address) if holder is None else as_(holder, front.address)
                async with client:
                    message = GetMessageClass(RPCS[name].input_type)().SerializeToString()
                    path = f"/{OPERATOR}/{name}"
                    code, text = await status_of(call_by_path(client, path, message, RPCS[name].server_streaming))
                if holder in (None, "nobody"):
                    assert code is Code.UNAUTHENTICATED
                else:
                    wanted = "observe" if name in READERS else "operate"
                    assert (code, text) == (
                        Code.PERMISSION_DENIED,
                        f"{name} asks for the role {wanted}, and {holder} has {holder}; "
                        "ask the operator for a credential with it",
                    )
                line = audited(tmp_path)[-1]
                assert (line["act"], line["outcome"]) == (name, code.name)
                assert line["identity"] == (holder if holder not in (None, "nobody") else "unknown")
                assert line["details"]["service"] == OPERATOR
            after = front.engine.status()
            assert (after.state, after.policy) == (before.state, before.policy)

    scenario()


@in_loop
async def test_those_who_may_are_served(tmp_path: Path) -> None:
    async with guarded(tmp_path) as front:
        async with as_("generate", front.address) as client:
            frames = [frame async for frame in client.generate(request_for(max_tokens=3))]
            assert sum(len(frame.token_ids) for frame in frames) == 3
            assert (await client.get_model()).name == "demo"
            assert front.engine.submitted[0].origin.identity == "generate"
        async with as_("observe", front.address) as client:
            assert (await client.get_status()).model.name == "demo"
            assert not (await client.list_requests()).requests
            assert (await client.watch_policy().read()).revision == 1
            code, _ = await status_of(client.call(request_for()))
            assert code is Code.PERMISSION_DENIED
        async with as_("operate", front.address) as client:
            await client.drain()
            await client.resume()
            assert (await client.get_status()).model.name == "demo"
            assert (await client.set_policy(2)).set_by.startswith("operate@ipv4:127.0.0.1:")
            code, _ = await status_of(client.get_model())
            assert code is Code.PERMISSION_DENIED, "who operates does not generate"


@in_loop
async def test_health_and_reflection_are_open(tmp_path: Path) -> None:
    async with guarded(tmp_path) as front:
        health = health_pb2_grpc.HealthStub(front.client.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        assert (await health.Watch(health_pb2.HealthCheckRequest()).read()).status
        stub = reflection_pb2_grpc.ServerReflectionStub(front.client.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        [reply] = [reply async for reply in call]
        # What reflection names is guarded all the same, whatever it is called by.
        names = {service.name for service in reply.list_services_response.service}
        assert OPERATOR in names
        for service in names - {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}:
            for method in ("Drain", "GetStatus", "Generate", "Abort"):
                async with as_("nobody", front.address) as client:
                    code, _ = await status_of(call_by_path(client, f"/{service}/{method}"))
                    assert code in (Code.UNAUTHENTICATED, Code.UNIMPLEMENTED)


@pytest.mark.parametrize(
    "path",
    [
        f"//{OPERATOR}/Drain",
        f"/{OPERATOR}//Drain",
        f"/{OPERATOR}/drain",
        f"/{OPERATOR.lower()}/Drain",
        "/OperatorService/Drain",
        "/outrider.v1.InferenceService/Drain",
        "/outrider.v1.InferenceService/../OperatorService/Drain",
        "/vllm.grpc.engine.VllmEngine/Drain",
        "/grpc.health.v1.Health/Drain",
        f"/{OPERATOR}/Drain?x=1",
        f"/{OPERATOR}%2FDrain",
    ],
)
def test_no_other_path_leads_to_an_operator_rpc(path: str, tmp_path: Path) -> None:
    @in_loop
    async def scenario() -> None:
        async with guarded(tmp_path) as front, as_("generate", front.address) as client:
            code, _ = await status_of(call_by_path(client, path))
            assert code in (Code.UNIMPLEMENTED, Code.PERMISSION_DENIED)
            assert front.engine.is_serving

    scenario()


@in_loop
async def test_the_face_of_gateways_is_for_those_who_generate(tmp_path: Path) -> None:
    from smg_grpc_proto import vllm_engine_pb2

    service = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
    async with guarded(tmp_path) as front:
        for holder in ("observe", "operate", "nobody"):
            async with as_(holder, front.address) as client:
                for method in service.methods:
                    path = f"/{service.full_name}/{method.name}"
                    code, _ = await status_of(call_by_path(client, path, b"", method.server_streaming))
                    assert code is (Code.UNAUTHENTICATED if holder == "nobody" else Code.PERMISSION_DENIED)
        async with as_("generate", front.address) as client:
            assert await call_by_path(client, f"/{service.full_name}/GetModelInfo")


@in_loop
async def test_ports_of_their_own_keep_the_services_apart(tmp_path: Path) -> None:
    async with guarded(tmp_path, operator__port=0) as front:
        operators = front.server.operator_address
        assert operators != front.address
        async with as_("operate", front.address) as client:
            code, _ = await status_of(client.drain())
            assert code is Code.UNIMPLEMENTED
        async with as_("generate", operators) as client:
            for call in (client.call(request_for()), client.drain()):
                code, _ = await status_of(call)
                assert code in (Code.UNIMPLEMENTED, Code.PERMISSION_DENIED)
        assert front.engine.is_serving
        async with as_("operate", operators) as client:
            await client.drain()
        assert not front.engine.is_serving


@pytest.mark.parametrize(
    ("values", "is_known"),
    [
        (["Bearer token-of-generate"], True),
        (["bearer token-of-generate"], True),
        (["BEARER  token-of-generate "], True),
        (["token-of-generate"], False),
        (["Basic token-of-generate"], False),
        (["Bearer"], False),
        (["Bearer "], False),
        (["Bearer token-of-generate x"], False),
        (["Bearer token-of-generate", "Bearer token-of-operate"], False),
        (["Bearer token-of-generate", "Bearer token-of-generate"], False),
        ([f"Bearer {digest('token-of-generate')}"], False),
        ([""], False),
        ([], False),
    ],
)
def test_a_token_is_taken_in_one_form(values: list[str], is_known: bool, tmp_path: Path) -> None:
    @in_loop
    async def scenario() -> None:
        async with guarded(tmp_path) as front:
            metadata = [("authorization", value) for value in values]
            call = front.client.call(request_for(max_tokens=1), metadata=metadata)
            if is_known:
                assert [frame async for frame in call]
                return
            code, text = await status_of(call)
            assert code is Code.UNAUTHENTICATED
            [line] = audited(tmp_path)
            for secret in ("token-of-generate", digest("token-of-generate")):
                assert secret not in text
                assert secret not in json.dumps(line)

    scenario()


@in_loop
async def test_who_may_not_call_is_told_so_before_a_message_is_read(tmp_path: Path) -> None:
    async with guarded(tmp_path) as front:

        async def endless() -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        call = front.client.channel.stream_unary("/outrider.v1.InferenceService/GetModel")(endless())
        code, _ = await status_of(call)
        assert code is Code.UNAUTHENTICATED
        garbage = front.client.channel.unary_unary(f"/{OPERATOR}/Drain")(b"\xff" * 1000)
        code, _ = await status_of(garbage)
        assert code is Code.UNAUTHENTICATED


@in_loop
async def test_what_an_operator_asked_in_vain_is_in_the_log_too(tmp_path: Path) -> None:
    async with guarded(tmp_path) as front, as_("operate", front.address) as client:
        await client.set_policy(2)
        code, _ = await status_of(client.set_policy(3, expected_revision=1))
        assert code is Code.ABORTED
        code, _ = await status_of(client.set_policy(99))
        assert code is Code.INVALID_ARGUMENT

        async def none() -> AsyncIterator[bytes]:
            return
            yield b""

        code, _ = await status_of(client.channel.stream_unary(f"/{OPERATOR}/Drain")(none()))
        assert code is Code.INVALID_ARGUMENT
    done, stale, wrong, empty = audited(tmp_path)
    assert (empty["act"], empty["outcome"], empty["identity"]) == ("Drain", "INVALID_ARGUMENT", "operate")
    assert [line["act"] for line in (done, stale, wrong)] == ["SetVerificationPolicy"] * 3
    assert [line["identity"] for line in (done, stale, wrong)] == ["operate"] * 3
    assert [line["outcome"] for line in (done, stale, wrong)] == ["OK", "ABORTED", "INVALID_ARGUMENT"]
    assert (done["details"]["policy"], done["details"]["revision"]) == ("fixed gamma=2", 2)
    assert json.loads(stale["details"]["request"])["policy"] == {"fixed": {"gamma": 3}}
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") and line["time"] for line in (done, stale, wrong))


@in_loop
async def test_every_act_of_an_operator_is_a_line(tmp_path: Path) -> None:
    async with guarded(tmp_path) as front, as_("operate", front.address) as client:
        acts = {
            "SetVerificationPolicy": lambda: client.set_policy(1),
            "SetShadowPolicy": lambda: client.set_shadow(None),
            "Drain": client.drain,
            "Resume": client.resume,
            "Abort": lambda: client.abort(["nobody"]),
            "CheckIntegrity": client.check_integrity,
        }
        assert set(acts) | {"Reload"} >= {name for name in RPCS if name not in READERS}
        for name, act in acts.items():
            await act()
            assert audited(tmp_path)[-1]["act"] == name
        assert len(audited(tmp_path)) == len(acts)
        assert front.engine.is_serving


@in_loop
async def test_without_identities_everybody_may_do_all_and_acts_are_written(tmp_path: Path) -> None:
    async with serving(settings={"access.audit_log": tmp_path / "audit.jsonl"}) as front:
        await front.client.drain()
        await front.client.resume()
        [_] = [line for line in audited(tmp_path) if line["act"] == "Drain" and line["identity"] == "anyone"]
