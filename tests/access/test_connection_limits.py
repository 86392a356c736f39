"""What a client may do with connections and streams: each bound is met by a client that breaks it, and nobody else
suffers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from fakes.front import Front, in_loop, request_for, serving, status_of
from fakes.rude_client import (
    CONTINUATION,
    DATA,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    MAX_CONCURRENT_STREAMS,
    PING,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    rude_client,
)
from grpc_reflection.v1alpha import reflection_pb2

from outrider.v1 import inference_pb2
from runtime.front.bounds import OPEN_LIMIT_BYTES

GENERATE = "/outrider.v1.InferenceService/Generate"
GET_MODEL = "/outrider.v1.InferenceService/GetModel"
QUICK = {"access.request_timeout_s": 0.3}


async def still_serves(front: Front) -> None:
    frames = [frame async for frame in front.client.generate(request_for(max_tokens=3))]
    assert sum(len(frame.token_ids) for frame in frames) == 3


@in_loop
async def test_one_connection_has_so_many_streams_and_no_more() -> None:
    async with serving(steps_by_itself=False, settings={"access.max_streams_per_connection": 3}) as front:
        async with rude_client(front.address) as client:
            client.open()
            settings = await client.until(SETTINGS)
            assert settings is not None
            assert settings.settings[MAX_CONCURRENT_STREAMS] == 3
            client.send(SETTINGS, 1)
            for stream in range(1, 11, 2):
                client.call(stream, GENERATE)
                client.message(stream, request_for(max_tokens=9).SerializeToString())
            refused = []
            while len(refused) < 2:
                frame = await client.until(RST_STREAM, GOAWAY)
                assert frame is not None
                assert (frame.kind, frame.code) == (RST_STREAM, REFUSED_STREAM)
                refused.append(frame.stream)
            assert refused == [7, 9]
            await front.engine.until(lambda: len(front.engine.live) == 3)
        # What was open ends with its connection.
        await front.engine.until(lambda: not front.engine.live)
        call = front.client.call(request_for(max_tokens=3))
        await front.engine.until(lambda: len(front.engine.live) == 1)
        front.engine.step()
        assert [list(frame.token_ids) async for frame in call]


@in_loop
async def test_a_port_has_so_many_connections_and_no_more() -> None:
    async with serving(settings={"access.max_connections": 2}) as front:
        await still_serves(front)
        async with rude_client(front.address) as second:
            second.open()
            assert await second.until(SETTINGS)
            async with rude_client(front.address) as third:
                third.open()
                assert await third.until_closed() == []
            await still_serves(front)


@in_loop
async def test_a_connection_without_calls_is_closed() -> None:
    async with serving(settings={"access.max_connection_idle_s": 0.2}) as front, rude_client(front.address) as client:
        client.open()
        began = time.monotonic()
        assert GOAWAY in {frame.kind for frame in await client.until_closed()}
        assert time.monotonic() - began < 10
        await still_serves(front)


@in_loop
async def test_who_connects_and_says_nothing_is_cut_off() -> None:
    async with (
        serving(settings=QUICK) as front,
        rude_client(front.address) as silent,
        rude_client(front.address) as slow,
    ):
        slow.raw(b"PRI * HTTP/2.0")
        await silent.until_closed()
        await slow.until_closed()
        await still_serves(front)


@in_loop
async def test_a_message_that_does_not_come_ends_its_call() -> None:
    async with serving(settings=QUICK) as front, rude_client(front.address) as client:
        client.open()
        client.call(1, GENERATE)
        client.call(3, GENERATE)
        client.send(DATA, 0, 3, b"\0" + (1000).to_bytes(4) + b"a few bytes of a thousand")
        client.call(5, "/grpc.health.v1.Health/Check")
        ended: set[int] = set()
        while len(ended) < 3:
            frame = await client.until(HEADERS, GOAWAY)
            assert frame is not None
            assert (frame.kind, frame.flags & END_STREAM) == (HEADERS, END_STREAM)
            ended.add(frame.stream)

        async def nothing() -> AsyncIterator[inference_pb2.GetModelRequest]:
            await asyncio.Event().wait()
            yield inference_pb2.GetModelRequest()

        call = front.client.channel.stream_unary(GET_MODEL)(nothing())
        assert await status_of(call) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "no whole message within 0.3 s of the call's beginning",
        )
        await still_serves(front)


@in_loop
async def test_a_call_that_ends_without_a_message_is_told_so() -> None:
    async with serving() as front:

        async def none() -> AsyncIterator[bytes]:
            return
            yield b""

        code, text = await status_of(front.client.channel.stream_unary(GET_MODEL)(none()))
        assert (code, text) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "request: the call ended without a message; send one",
        )


@in_loop
async def test_a_stream_of_reflection_has_bounds_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    long = reflection_pb2.ServerReflectionRequest(file_by_filename="x" * OPEN_LIMIT_BYTES).SerializeToString()
    soon = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()

    async def asked(*messages: bytes) -> AsyncIterator[bytes]:
        for message in messages:
            yield message
        await asyncio.Event().wait()

    async with serving(settings=QUICK) as front:
        for messages, code, told in (
            ((soon, b"\xff"), grpc.StatusCode.INVALID_ARGUMENT, "request: not a message of its type"),
            ((soon, long), grpc.StatusCode.RESOURCE_EXHAUSTED, "at most 65536 are taken"),
            ((soon, soon), grpc.StatusCode.DEADLINE_EXCEEDED, "nothing was asked for 0.3 s; call again when there is"),
            ((), grpc.StatusCode.DEADLINE_EXCEEDED, "nothing was asked for 0.3 s; call again when there is"),
        ):
            call = front.client.channel.stream_stream(path)(asked(*messages))
            found, text = await status_of(call)
            assert (found, told in text) == (code, True), text
        await still_serves(front)
    assert "Traceback" not in caplog.text


@in_loop
async def test_headers_that_do_not_end_hold_nobody_up_and_go_with_their_connection() -> None:
    async with serving() as front:
        async with rude_client(front.address) as client:
            client.open()
            client.call(1, GENERATE, ends=False)
            client.send(CONTINUATION, 0, 1, b"")
            await still_serves(front)
        assert not front.engine.live


@in_loop
async def test_metadata_past_its_bound_is_refused() -> None:
    """gRPC refuses some of it by itself, and lets some through that comes in several frames."""
    async with serving() as front:
        for count in (7, 17, 20, 100, 400):
            async with rude_client(front.address) as client:
                client.open()
                client.call(1, GET_MODEL, *((f"x-{number}", "x" * 1000) for number in range(count)))
                client.message(1, b"")
                frame = await client.until(DATA, HEADERS, RST_STREAM, GOAWAY)
                while frame is not None and frame.kind == HEADERS and not frame.flags & END_STREAM:
                    frame = await client.until(DATA, HEADERS, RST_STREAM, GOAWAY)
                assert frame is not None
                assert frame.kind == (DATA if count == 7 else HEADERS)
                assert count == 7 or b"grpc-status\x018" in frame.payload, "RESOURCE_EXHAUSTED"
        await still_serves(front)


@in_loop
async def test_a_flood_of_pings_ends_its_connection() -> None:
    async with serving() as front, rude_client(front.address) as client:
        client.open()
        assert await client.until(SETTINGS)
        client.send(SETTINGS, 1)
        for number in range(10):
            client.send(PING, 0, 0, number.to_bytes(8))
            said = await client.until(PING, GOAWAY)
            assert said is not None
            if said.kind == GOAWAY:
                break
        assert (said.kind, said.code) == (GOAWAY, ENHANCE_YOUR_CALM)
        await client.until_closed()
        await still_serves(front)


@in_loop
async def test_pings_of_a_well_behaved_client_are_no_flood() -> None:
    async with serving() as front, rude_client(front.address) as client:
        client.open()
        for number in range(2):
            client.send(PING, 0, 0, number.to_bytes(8))
        for number in range(2):
            answer = await client.until(PING, GOAWAY)
            assert answer is not None
            assert (answer.kind, answer.payload) == (PING, number.to_bytes(8))


@in_loop
async def test_streams_that_are_reset_at_once_leave_nothing_behind() -> None:
    async with serving(steps_by_itself=False) as front:
        async with rude_client(front.address) as client:
            client.open()
            for stream in range(1, 1001, 2):
                client.call(stream, GENERATE)
                client.message(stream, request_for(max_tokens=9).SerializeToString())
                client.send(RST_STREAM, 0, stream, (8).to_bytes(4))
            client.call(2001, GET_MODEL)
            client.message(2001, inference_pb2.GetModelRequest().SerializeToString())
            while (frame := await client.until(DATA, GOAWAY)) is not None and frame.kind != GOAWAY:
                if frame.stream == 2001:
                    break
        await front.engine.until(lambda: not front.engine.live)
        assert not front.hub.num_streams
        await asyncio.wait_for(front.client.get_model(), 5)
