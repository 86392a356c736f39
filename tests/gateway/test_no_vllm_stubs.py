"""A server where the stubs of vllm.grpc.engine are not installed does without that face."""

from __future__ import annotations

import grpc
import pytest
from fakes.front import in_loop, request_for, serving, status_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from runtime.front import server
from runtime.front.vllm.presence import VLLM_ENGINE


@pytest.fixture(autouse=True)
def _no_stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "why_absent", lambda: "smg-grpc-proto is not installed")


@in_loop
async def test_the_other_faces_are_served_all_the_same() -> None:
    async with serving() as front:
        stub = vllm_grpc.VllmEngineStub(front.client.channel)
        assert (await status_of(stub.Generate(vllm.GenerateRequest(text="x"))))[0] is grpc.StatusCode.UNIMPLEMENTED
        health = health_pb2_grpc.HealthStub(front.client.channel)
        code, _ = await status_of(health.Check(health_pb2.HealthCheckRequest(service=VLLM_ENGINE)))
        assert code is grpc.StatusCode.NOT_FOUND
        assert [frame async for frame in front.client.generate(request_for(max_tokens=1))]
