"""The face vllm.grpc.engine over the fake engine: a front on loopback and a stub of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fakes.engine import FakeEngine
from fakes.front import Front, serving
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from runtime.request import Request


@dataclass(frozen=True, slots=True)
class Face:
    front: Front
    stub: Any

    @property
    def engine(self) -> FakeEngine:
        return self.front.engine

    async def generate(self, message: vllm.GenerateRequest) -> list[vllm.GenerateResponse]:
        return [frame async for frame in self.stub.Generate(message)]


@asynccontextmanager
async def face_serving(
    script: Sequence[int] | Callable[[Request], Sequence[int]] = (65, 66, 67), **options: Any
) -> AsyncIterator[Face]:
    """Options as those of `fakes.front.serving`."""
    async with serving(script, **options) as front:
        yield Face(front, vllm_grpc.VllmEngineStub(front.client.channel))


def message_for(
    *, text: str | None = None, ids: Sequence[int] = (1, 2, 3), stream: bool = True, request_id: str = "", **params: Any
) -> vllm.GenerateRequest:
    """A request of this face; params: fields of its sampling_params."""
    message = vllm.GenerateRequest(
        request_id=request_id, stream=stream, sampling_params=vllm.SamplingParams(**params), text=text
    )
    if text is None:
        message.tokenized.input_ids.extend(ids)
    return message
