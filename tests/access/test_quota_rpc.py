"""An identity's limits over gRPC: whoever reaches one is told when to try again, and nobody else suffers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from fakes.front import Front, in_loop, request_for, serving, status_of
from google.rpc import error_details_pb2, status_pb2

from outrider.v1 import inference_pb2, types_pb2
from runtime.front.client import OutriderClient
from runtime.front.credentials import Credentials

Code = grpc.StatusCode


@asynccontextmanager
async def limited(tmp_path: Path, *, steps_by_itself: bool = True, **limits: int) -> AsyncIterator[Front]:
    """A front whose client has limits; `other` names one that has none."""
    write(tmp_path, **limits)
    async with serving(
        steps_by_itself=steps_by_itself,
        settings={"access.identities": tmp_path / "identities.yaml"},
        credentials=Credentials(token="ada"),
    ) as front:
        yield front


def write(tmp_path: Path, **limits: int) -> None:
    entries = [
        {"name": name, "roles": ["generate"], "token_sha256": hashlib.sha256(name.encode()).hexdigest()}
        for name in ("ada", "other")
    ]
    entries[0]["limits"] = limits
    (tmp_path / "identities.yaml").write_text(yaml.safe_dump({"identities": entries}))


async def served(client: OutriderClient, **fields: Any) -> list[inference_pb2.GenerateResponse]:
    return [frame async for frame in client.generate(request_for(**fields))]


async def refused(client: OutriderClient, **fields: Any) -> grpc.aio.AioRpcError:
    try:
        await served(client, **fields)
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("it was served")


@in_loop
async def test_requests_at_a_time(tmp_path: Path) -> None:
    async with limited(tmp_path, steps_by_itself=False, concurrency=2) as front:
        calls = [front.client.call(request_for(max_tokens=3)) for _ in range(2)]
        await front.engine.until(lambda: len(front.engine.live) == 2)
        code, text = await status_of(front.client.call(request_for(max_tokens=3)))
        assert (code, text) == (
            Code.RESOURCE_EXHAUSTED,
            "ada has 2 requests running and may have 2; try again when one has ended",
        )
        async with OutriderClient(front.address, Credentials(token="other")) as other:
            calls.append(other.call(request_for(max_tokens=3)))
            await front.engine.until(lambda: len(front.engine.live) == 3)
            front.engine.step()
            for call in calls:
                assert [frame async for frame in call]
        call = front.client.call(request_for(max_tokens=3))
        await front.engine.until(lambda: len(front.engine.live) == 1)
        call.cancel()
        await front.engine.until(lambda: not front.engine.live)


@in_loop
async def test_tokens_a_minute_with_the_time_of_the_next_try(tmp_path: Path) -> None:
    async with limited(tmp_path, tokens_per_minute=20) as front:
        assert await served(front.client, ids=[1] * 4, max_tokens=9)
        # 13 are used; what ended early or was refused counts for what it brought.
        error = await refused(front.client, ids=[1] * 4, max_tokens=4)
        assert error.code() is Code.RESOURCE_EXHAUSTED
        trailers = dict(error.trailing_metadata() or ())
        wait_ms = int(trailers["grpc-retry-pushback-ms"])
        assert 59_000 < wait_ms <= 61_000
        assert f"try again in {-(-wait_ms // 1000)} s, or lower max_tokens" in (error.details() or "")
        status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        info = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(info)
        assert info.retry_delay.ToMilliseconds() == wait_ms
        assert await served(front.client, ids=[1] * 4, max_tokens=3)
        async with OutriderClient(front.address, Credentials(token="other")) as other:
            assert await served(other, ids=[1] * 100, max_tokens=100)
        error = await refused(front.client, ids=[1] * 4, max_tokens=5, n=4)
        assert (error.code(), (error.details() or "")[:20]) == (Code.INVALID_ARGUMENT, "stopping.max_tokens:")
        # The file says otherwise, and so it is.
        write(tmp_path, tokens_per_minute=2000)
        [watched] = front.server.watched
        assert watched.check()
        assert await served(front.client, ids=[1] * 4, max_tokens=5, n=4)


@in_loop
async def test_tokens_of_a_run_that_ends_early_are_given_back(tmp_path: Path) -> None:
    async with limited(tmp_path, tokens_per_minute=40) as front:
        frames = await served(front.client, max_tokens=35, stop_token_ids=[66])  # the second of the script
        assert frames[-1].usage.completion_tokens == 2
        assert await served(front.client, max_tokens=35)
        assert (await refused(front.client, max_tokens=3)).code() is Code.RESOURCE_EXHAUSTED


@in_loop
async def test_a_request_that_the_engine_refuses_takes_nothing(tmp_path: Path) -> None:
    async with limited(tmp_path, tokens_per_minute=40, concurrency=1) as front:
        for _ in range(5):
            front.engine.drain()
            assert (await refused(front.client, max_tokens=30)).code() is Code.UNAVAILABLE
            front.engine.resume()
        assert await served(front.client, max_tokens=30)


@in_loop
async def test_a_stream_that_is_left_gives_back_what_it_did_not_take(tmp_path: Path) -> None:
    async with limited(tmp_path, steps_by_itself=False, tokens_per_minute=100, concurrency=1) as front:
        call = front.client.call(request_for(max_tokens=99))
        await front.engine.until(lambda: bool(front.engine.live))
        front.engine.step()
        assert (await call.read()).token_ids
        call.cancel()
        await front.engine.until(lambda: not front.engine.live)
        again = front.client.call(request_for(max_tokens=90))
        await front.engine.until(lambda: bool(front.engine.live))
        again.cancel()
        await front.engine.until(lambda: not front.engine.live)


@pytest.mark.parametrize("is_stream", [True, False])
@in_loop
async def test_what_was_made_for_a_caller_who_left_counts(tmp_path: Path, is_stream: bool) -> None:
    async with limited(tmp_path, steps_by_itself=False, tokens_per_minute=100) as front:
        call = front.client.call(request_for(max_tokens=40, n=2, stream=is_stream))
        await front.engine.until(lambda: len(front.engine.live) == 2)
        for _ in range(10):
            front.engine.step()  # three tokens of each sequence
        call.cancel()
        await front.engine.until(lambda: not front.engine.live)
        error = await refused(front.client, max_tokens=99)
        assert "61 are used and 0 set aside" in (error.details() or "")


@in_loop
async def test_the_longest_context_of_an_identity(tmp_path: Path) -> None:
    async with limited(tmp_path, max_context=64) as front:
        [*_, last] = await served(front.client, ids=[1] * 60, max_tokens=100)
        assert (last.finish.reason, last.usage.completion_tokens) == (types_pb2.FINISH_REASON_LENGTH, 4)
        for fields in ({"ids": [1] * 64}, {"text": "x = 1\n" * 40}):
            error = await refused(front.client, **fields)
            assert error.code() is Code.INVALID_ARGUMENT
            assert "and the context holds 64" in (error.details() or "")
        async with OutriderClient(front.address, Credentials(token="other")) as other:
            assert await served(other, ids=[1] * 200, max_tokens=2)


@in_loop
async def test_many_callers_at_once_never_pass_the_limit(tmp_path: Path) -> None:
    async with limited(tmp_path, tokens_per_minute=100, concurrency=3) as front:
        outcomes = await asyncio.gather(
            *(served(front.client, ids=[1, 2], max_tokens=5) for _ in range(40)), return_exceptions=True
        )
        refusals = [one for one in outcomes if isinstance(one, grpc.aio.AioRpcError)]
        assert {error.code() for error in refusals} == {Code.RESOURCE_EXHAUSTED}
        answers = [one for one in outcomes if isinstance(one, list)]
        assert len(answers) + len(refusals) == 40
        taken = sum(2 + sum(len(frame.token_ids) for frame in frames) for frames in answers)
        assert 0 < taken <= 100
