"""Bytes that are no message, and calls that end under their handler: answered or let go, and never our error."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from fakes.front import in_loop, request_for, serving, status_of

from outrider.v1 import inference_pb2, operator_pb2
from runtime.front.errors import Unavailable
from runtime.front.status import MAX_DETAILS_CHARS, answering
from runtime.request import Request

OPERATOR = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"]
METHODS = {
    "/outrider.v1.InferenceService/Generate": True,
    "/outrider.v1.InferenceService/GetModel": False,
    "/outrider.v1.InferenceService/Tokenize": False,
    **{f"/outrider.v1.OperatorService/{method.name}": False for method in OPERATOR.methods},
    "/grpc.health.v1.Health/Check": False,
    "/grpc.health.v1.Health/Watch": True,
}
"""Which of them stream."""


def raw_call(channel: grpc.aio.Channel, method: str, data: bytes) -> Any:
    if METHODS[method]:
        return channel.unary_stream(method)(data)
    return channel.unary_unary(method)(data)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message_are_an_invalid_argument(method: str, caplog: pytest.LogCaptureFixture) -> None:
    @in_loop
    async def scenario() -> None:
        async with serving() as front, grpc.aio.insecure_channel(front.address) as channel:
            code, text = await status_of(raw_call(channel, method, b"\xff\xff"))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert text.startswith("request: not a message of its type: ")

    scenario()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@in_loop
async def test_text_that_is_not_utf8_is_named() -> None:
    async with serving() as front, grpc.aio.insecure_channel(front.address) as channel:
        method = "/outrider.v1.InferenceService/Generate"
        code, text = await status_of(raw_call(channel, method, b"\x1a\x02\xff\xfe"))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "UTF-8" in text
        request = request_for(max_tokens=2).SerializeToString()
        frames = [inference_pb2.GenerateResponse.FromString(data) async for data in raw_call(channel, method, request)]
        assert sum(len(frame.token_ids) for frame in frames) == 2
        assert (await status_of(channel.unary_unary("/outrider.v1.InferenceService/No")(b"")))[0] is (
            grpc.StatusCode.UNIMPLEMENTED
        )


def test_clients_that_leave_in_their_first_moments_leave_no_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @in_loop
    async def scenario() -> None:
        async with serving(steps_by_itself=False) as front:
            submit = front.engine.submit

            def submit_and_be_left(request: Request) -> None:
                submit(request)
                call.cancel()
                time.sleep(0.05)  # the loop is busy; meanwhile the transport hears of it

            monkeypatch.setattr(front.engine, "submit", submit_and_be_left)
            for _ in range(10):
                call = front.client.call(request_for(max_tokens=4))
                assert (await call.code()) is grpc.StatusCode.CANCELLED
                await front.engine.until(lambda: not front.engine.live)
            assert len(front.engine.aborted) == 10

    scenario()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class EndedContext:
    """A call that has ended before its handler was told: the transport refuses whatever is sent."""

    async def abort(self, *status: object) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch": (SendStatusFromServerOperation,)')


@pytest.mark.parametrize(
    "error",
    [
        grpc.aio.InternalError('Failed "execute_batch": (SendInitialMetadataOperation,)'),
        grpc.aio.UsageError("RPC already finished."),
        Unavailable("this server has stopped"),
    ],
)
def test_a_call_that_ends_under_its_handler_counts_as_cancelled(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    @in_loop
    async def scenario() -> None:
        with pytest.raises(asyncio.CancelledError):
            async with answering(EndedContext()):  # type: ignore[arg-type]
                raise error

    with caplog.at_level(logging.DEBUG, "runtime.front.status"):
        scenario()
    [record] = [record for record in caplog.records if record.name == "runtime.front.status"]
    assert record.levelno == logging.DEBUG
    assert record.exc_info is None


@in_loop
async def test_what_a_client_sent_is_quoted_in_part() -> None:
    async with serving() as front:
        code, text = await status_of(front.client.call(request_for(model="é" * 100_000)))
        assert code is grpc.StatusCode.NOT_FOUND
        assert len(text) == MAX_DETAILS_CHARS
        assert text.startswith("model: 'ééé")
        assert text.endswith("é ...")
