"""JSON through Envoy: what goes in, frames as lines or events, and errors as HTTP statuses with a body."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fakes.envoy import SECTION, Envoy
from fakes.envoy_house import behind_envoy
from fakes.front import TOKENIZER, Front, in_loop
from fakes.http import Answer, asking
from google.protobuf.json_format import MessageToDict, ParseDict

from outrider.v1 import inference_pb2
from runtime.front import errors as errors_module
from runtime.front.errors import AbortedByOperator, InvalidRequest, OutriderError

NAME = errors_module.__name__
GENERATE = "/v1/generate"
TEXT = 'hé€😀 \\ " \u2028 ​\u0001 é'
"""Of characters of one to four bytes, some of which JSON escapes."""


async def answer_to(envoy: Envoy, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of a request; GET where there is no body."""
    async with asking("GET" if body is None else "POST", envoy.address, path, body, headers=headers) as answer:
        assert answer.headers["content-type"] == "application/json"
        return answer.status, await answer.json()


async def begun(stack: AsyncExitStack, front: Front, envoy: Envoy, max_tokens: int, **headers: str) -> Answer:
    """An answer of which the first frame has been made; its head comes with that one."""
    body = {"token_ids": {"ids": [1]}, "stopping": {"max_tokens": max_tokens, "ignore_eos": True}}
    asked = asking("POST", envoy.address, GENERATE, body, headers=headers)
    opening = asyncio.ensure_future(stack.enter_async_context(asked))
    await front.engine.until(lambda: front.engine.live)
    front.engine.step()
    return await opening


@in_loop
async def test_the_model_and_tokens_are_those_of_grpc(tmp_path):
    async with behind_envoy(tmp_path) as (_, envoy, client):
        status, model = await answer_to(envoy, "/v1/model")
        assert status == 200
        assert ParseDict(model, inference_pb2.GetModelResponse()) == await client.get_model()
        assert model["vocab_size"] == 4096, "names are those of the .proto files"
        status, tokens = await answer_to(envoy, "/v1/tokenize", {"text": TEXT})
        assert (status, tokens) == (200, {"token_ids": await client.tokenize(TEXT)})
        chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content=TEXT)])
        status, tokens = await answer_to(envoy, "/v1/tokenize", {"chat": MessageToDict(chat)})
        assert (status, tokens) == (200, {"token_ids": await client.tokenize_chat(chat)})


@in_loop
async def test_a_request_means_what_it_means_in_grpc(tmp_path):
    async with behind_envoy(tmp_path) as (front, envoy, client):
        body = {
            "request_id": "mine",
            "token_ids": {"ids": [1, 2, 3]},
            "sampling": {
                "temperature": 0.5,
                "seed": "18446744073709551615",
                "logit_bias": {"7": 1.5},
                "verification": "VERIFICATION_COUPLED",
            },
            "stopping": {"maxTokens": 4, "stop_token_ids": [9]},
            "n": 2,
        }
        async with asking("POST", envoy.address, GENERATE, body) as answer:
            frames = [ParseDict(json.loads(line), inference_pb2.GenerateResponse()) async for line in answer.lines()]
        [by_json] = front.engine.submitted
        request = ParseDict(body, inference_pb2.GenerateRequest())
        by_grpc = [frame async for frame in client.generate(request)]
        assert by_json.sampling == front.engine.submitted[1].sampling
        assert by_json.stopping == front.engine.submitted[1].stopping
        assert by_json.prompt == (1, 2, 3)

        def texts(frames: list[inference_pb2.GenerateResponse]) -> dict[int, str]:
            return {index: "".join(frame.text for frame in frames if frame.index == index) for index in (0, 1)}

        assert texts(frames) == texts(by_grpc)
        assert frames[-1].total == by_grpc[-1].total


@pytest.mark.parametrize("form", ["lines", "events"])
@in_loop
async def test_frames_arrive_as_they_are_made(tmp_path, form):
    ids = await TOKENIZER.encode(TEXT)
    async with behind_envoy(tmp_path, script=ids, steps_by_itself=False) as (front, envoy, _):
        headers = {"accept": "text/event-stream"} if form == "events" else {}
        async with AsyncExitStack() as stack:
            answer = await begun(stack, front, envoy, len(ids), **headers)
            assert answer.status == 200
            assert answer.headers["content-type"] == ("text/event-stream" if form == "events" else "application/json")
            chunks = answer.chunks()
            text, frame = "", {}
            while "finish" not in frame:
                piece = (await anext(chunks)).decode()
                assert piece.endswith("\n\n" if form == "events" else "\n"), "a frame comes whole, and by itself"
                frame = json.loads(piece.removeprefix("data: "))
                text += frame.get("text", "")
                front.engine.step()
            assert text.encode() == TEXT.encode()
            assert frame["finish"] == {"reason": "FINISH_REASON_LENGTH"}
            assert [chunk async for chunk in chunks] == []
            assert answer.trailers["grpc-status"] == "0"


@in_loop
async def test_a_client_that_leaves_ends_our_work(tmp_path):
    async with behind_envoy(tmp_path, steps_by_itself=False) as (front, envoy, _):
        async with AsyncExitStack() as stack:
            await begun(stack, front, envoy, 100)
        await front.engine.until(lambda: not front.engine.live)
        assert front.engine.aborted == [front.engine.submitted[0].uid]


@in_loop
async def test_a_deadline_before_the_first_frame_is_an_http_status(tmp_path):
    async with behind_envoy(tmp_path, steps_by_itself=False) as (front, envoy, _):
        status, error = await answer_to(envoy, GENERATE, {"text": "hé"}, **{"grpc-timeout": "300m"})
        assert (status, error["code"]) == (504, 4)
        await front.engine.until(lambda: not front.engine.live)
        assert front.engine.submitted


@in_loop
async def test_what_outrider_refuses_is_told_with_its_words(tmp_path):
    async with behind_envoy(tmp_path) as (front, envoy, _):
        problem = "must be at least 1; leave it out for the server's default"
        status, error = await answer_to(envoy, GENERATE, {"text": "hé", "stopping": {"max_tokens": 0}})
        assert status == 400
        assert error == {
            "code": 3,
            "message": f"stopping.max_tokens: {problem}",
            "details": [
                {
                    "@type": "type.googleapis.com/google.rpc.BadRequest",
                    "field_violations": [{"field": "stopping.max_tokens", "description": problem}],
                }
            ],
        }
        error = {"code": 5, "message": "model: 'é' is not served here, 'demo' is"}
        assert await answer_to(envoy, GENERATE, {"text": "hé", "model": "é"}) == (404, error)
        status, error = await answer_to(envoy, GENERATE, {})
        assert (status, error["message"]) == (400, "input: none is given; set text or token_ids or chat")
        status, error = await answer_to(envoy, "/v1/tokenize", {"text": "x" * 5_000_000})
        assert (status, error["code"]) == (429, 8)
        assert not front.engine.submitted


@in_loop
async def test_every_error_has_the_http_status_that_is_written_down(tmp_path):
    rows = re.findall(r"^\| ([A-Z_]+) (\d+) \| (\d+) \|", SECTION, re.MULTILINE)
    written = {(code, int(number), int(status)) for code, number, status in rows}
    errors = [kind for kind in vars(errors_module).values() if isinstance(kind, type) and kind.__module__ == NAME]
    assert len(errors) > 10
    async with behind_envoy(tmp_path) as (front, envoy, _):
        for kind in errors:

            def refuse(request: object, kind: type[OutriderError] = kind) -> None:
                raise kind("field", "it is é") if kind is InvalidRequest else kind("it is é")

            front.engine.submit = refuse  # type: ignore[method-assign]
            status, error = await answer_to(envoy, GENERATE, {"text": "hé"})
            assert error["message"].endswith("it is é")
            assert (kind.code, error["code"], status) in written


@in_loop
async def test_an_error_before_the_first_frame_is_an_http_status(tmp_path):
    async with behind_envoy(tmp_path, steps_by_itself=False) as (front, envoy, _):
        asked = asyncio.create_task(answer_to(envoy, GENERATE, {"text": "hé"}))
        await front.engine.until(lambda: front.engine.live)
        front.engine.fail(front.engine.submitted[0].uid, AbortedByOperator("an operator, é"))
        assert await asked == (409, {"code": 10, "message": "an operator, é"})


@in_loop
async def test_an_error_after_the_first_frame_is_told_in_the_trailers(tmp_path):
    async with behind_envoy(tmp_path, steps_by_itself=False) as (front, envoy, _), AsyncExitStack() as stack:
        answer = await begun(stack, front, envoy, 100)
        lines = answer.lines()
        assert "finish" not in json.loads(await anext(lines))
        front.engine.fail(front.engine.submitted[0].uid, AbortedByOperator("an operator, é"))
        assert [line async for line in lines] == []
        assert answer.trailers["grpc-status"] == "10"
        assert answer.trailers["grpc-message"] == "an operator, %C3%A9"
        assert answer.trailers["x-tokens-sent"] == "3"


REFUSED_BY_ENVOY: tuple[tuple[str, Any, int, int, str], ...] = (
    (GENERATE, b"{nope", 400, 3, "Expected : between key:value pair"),
    (GENERATE, b'{"text":"\xff\xfe"}', 400, 3, "non UTF-8"),
    (GENERATE, {"stopping": {"max_tokens": "many"}}, 400, 3, "stopping.max_tokens"),
    (GENERATE, {"stopping": {"max_tokens": -1}}, 400, 3, "stopping.max_tokens"),
    (GENERATE, {"sampling": {"verification": "NONE_SUCH"}}, 400, 3, "sampling.verification"),
    (GENERATE, {"text": "a", "token_ids": {"ids": [1]}}, 400, 3, "'input' is already set"),
    (GENERATE, b"[1]", 400, 3, "must be a message"),
    ("/v1/tokenize", {"text": "x" * 17_000_000}, 413, 8, "Too Large"),
    ("/v1/model?verbose=1", None, 400, 3, "verbose"),
    ("/v1/models", None, 404, 5, "/v1/models"),
    (GENERATE, None, 404, 5, GENERATE),
    ("/operator/v1/status", None, 404, 5, "/operator/v1/status"),
    ("/operator/v1/drain", {}, 404, 5, "/operator/v1/drain"),
)
"""Path, body, HTTP status, gRPC status, and words of the message."""


@in_loop
async def test_what_envoy_refuses_has_the_same_form(tmp_path):
    async with behind_envoy(tmp_path) as (front, envoy, _):
        for path, body, status, code, words in REFUSED_BY_ENVOY:
            found, error = await answer_to(envoy, path, body)
            assert (found, error["code"], error.keys()) == (status, code, {"code", "message"}), (path, words)
            assert words in error["message"]
        assert front.engine.is_serving
        assert not front.engine.submitted


@in_loop
async def test_envoy_drops_fields_that_it_does_not_know(tmp_path):
    """It has no option to refuse them; docs/gateways.md warns of it. Where this fails, that warning can go."""
    async with behind_envoy(tmp_path) as (front, envoy, _):
        body = {"token_ids": {"ids": [1]}, "max_token": 5, "stopping": {"max_tokens": 3, "stopp": ["a"]}}
        async with asking("POST", envoy.address, GENERATE, body) as answer:
            assert answer.status == 200
        assert front.engine.submitted[0].stopping.max_tokens == 3


@in_loop
async def test_where_no_replica_serves_json_and_grpc_are_told_alike(tmp_path):
    async with behind_envoy(tmp_path) as (front, envoy, _):
        front.engine.drain()
        status, error = await answer_to(envoy, GENERATE, {"text": "hé"})
        assert (status, error) == (503, {"code": 14, "message": "the server is draining; try again later"})
        await envoy.until_replicas({front.address: False})
        assert await answer_to(envoy, GENERATE, {"text": "hé"}) == (503, {"code": 14, "message": "no healthy upstream"})
        front.engine.resume()
        await envoy.until_replicas({front.address: True})
        status, _ = await answer_to(envoy, "/v1/model")
        assert status == 200
