"""What one request may hold, over gRPC: the limit is told, the engine never hears of it, and others are served."""

from __future__ import annotations

import grpc
import pytest
from fakes.engine import DESCRIPTION
from fakes.front import in_loop, request_for, serving, status_of

from outrider.v1 import inference_pb2, types_pb2
from runtime.front.bounds import MAX_CHAT_MESSAGES, STOCK_LIMIT_BYTES
from runtime.front.sampling_fields import MAX_CHOICES, MAX_CONSTRAINT_BYTES
from runtime.request import MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

Code = grpc.StatusCode


def constrained(**kind: object) -> inference_pb2.GenerateRequest:
    return request_for(constraint=types_pb2.Constraint(**kind))


LIMITS = {
    "message bytes": (request_for(text="x" * STOCK_LIMIT_BYTES), f"at most {STOCK_LIMIT_BYTES} are taken"),
    "message bytes past gRPC's own limit": (request_for(text="x" * (17 << 20)), "larger than max"),
    "prompt tokens": (request_for(ids=[1] * DESCRIPTION.max_model_len), "token_ids: the prompt has"),
    "prompt text": (request_for(text="x = 1\n" * 60_000), "text: 360000 bytes of text"),
    "chat messages": (
        inference_pb2.GenerateRequest(
            chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage()] * (MAX_CHAT_MESSAGES + 1))
        ),
        "chat.messages: 4097 messages",
    ),
    "stop strings": (request_for(stop=["x"] * (MAX_STOP_STRINGS + 1)), "stopping.stop"),
    "stop string bytes": (request_for(stop=["x" * (MAX_STOP_STRING_BYTES + 1)]), "stopping.stop"),
    "stop token ids": (request_for(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1)), "stopping.stop_token_ids"),
    "grammar size": (constrained(lark="x" * (MAX_CONSTRAINT_BYTES + 1)), "constraint.lark: 65537 bytes long"),
    "schema size": (constrained(json_schema="x" * (MAX_CONSTRAINT_BYTES + 1)), "constraint.json_schema: 65537 bytes"),
    "choices": (
        constrained(choice=types_pb2.Choices(texts=["x"] * (MAX_CHOICES + 1))),
        "constraint.choice.texts",
    ),
    "sequences": (request_for(n=65), "n: 65 is not from 1 to 64"),
    "request id": (request_for(request_id="x" * 257), "request_id: must be 1 to 256"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_told_and_nobody_else_suffers(limit: str) -> None:
    message, told = LIMITS[limit]

    @in_loop
    async def scenario() -> None:
        async with serving() as front:
            code, text = await status_of(front.client.call(message))
            wanted = Code.RESOURCE_EXHAUSTED if limit.startswith("message bytes") else Code.INVALID_ARGUMENT
            assert (code, told in text) == (wanted, True), text
            assert len(text) < 700
            assert not front.engine.submitted
            assert not front.engine.prepared
            frames = [frame async for frame in front.client.generate(request_for(max_tokens=3))]
            assert sum(len(frame.token_ids) for frame in frames) == 3

    scenario()
