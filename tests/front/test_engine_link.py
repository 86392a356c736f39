"""What the front relies on, asked of the real engine and of the fake that the other tests here stand on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fakes.engine import FakeEngine
from fakes.front import in_loop
from fakes.front_sink import RecordingSink
from fakes.requests import request
from fakes.worker import FakeSource, describe, true_stream

from configs.load import load_settings
from parallel.mesh import ONE_RANK
from runtime.engine import Engine
from runtime.front.engine_link import EngineLink
from runtime.front.errors import DuplicateRequest, InvalidRequest, StaleRevision
from runtime.request import Finish, FinishReason
from runtime.verification.policy import Fixed, Off

both = pytest.mark.parametrize("kind", ["real", "fake"])


@asynccontextmanager
async def engine_of(kind: str, sink: RecordingSink) -> AsyncIterator[EngineLink]:
    """A serving engine that emits `true_stream` of each request."""
    if kind == "real":
        engine = Engine(load_settings(None, {}), FakeSource(describe()), sink)
        await engine.start()
        yield engine
        await engine.stop(0)
        return
    fake = FakeEngine(sink, true_stream, description=describe())
    running = asyncio.create_task(fake.run())
    yield fake
    running.cancel()
    await asyncio.wait({running})


@both
@in_loop
async def test_tokens_come_with_counts_that_add_up_and_one_end(kind: str) -> None:
    sink = RecordingSink()
    async with engine_of(kind, sink) as engine:
        one = request(engine.next_uid(), max_tokens=8, report_rounds=True)
        engine.submit(one)
        await sink.wait_for_end(one.uid)
    assert tuple(sink.tokens[one.uid]) == true_stream(one)
    assert sink.end_of(one.uid) == Finish(reason=FinishReason.LENGTH)
    events = [event for batch in sink.batches for event in batch]
    for event in events:
        assert event.usage.completion == event.usage.accepted + event.usage.rounds - event.usage.trimmed
        assert tuple(token for part in event.rounds for token in part.emitted) == event.tokens
        assert all(len(part.margins) == len(part.emitted) for part in event.rounds)
    last = events[-1].usage
    assert (last.prompt, last.completion, last.seed) == (len(one.prompt), 8, one.sampling.seed)


@both
@in_loop
async def test_a_verdict_ends_a_request_without_a_further_event(kind: str) -> None:
    sink = RecordingSink()
    async with engine_of(kind, sink) as engine:
        stopped, other = (request(engine.next_uid(), max_tokens=20, stop_strings=("x",)) for _ in range(2))
        sink.stop_after[stopped.uid] = 4
        for one in (stopped, other):
            engine.submit(one)
        await sink.wait_for_end(stopped.uid, other.uid)
    assert sink.end_of(stopped.uid) == "stop string"
    assert sink.end_of(other.uid) == Finish(reason=FinishReason.LENGTH)
    assert all(event.needs_verdict for batch in sink.batches for event in batch)


@both
@in_loop
async def test_an_abort_ends_a_request_silently_and_frees_its_name(kind: str) -> None:
    sink = RecordingSink()
    async with engine_of(kind, sink) as engine:
        first = request(engine.next_uid(), request_id="name", max_tokens=8)
        engine.submit(first)
        with pytest.raises(DuplicateRequest):
            engine.submit(request(engine.next_uid(), request_id="name"))
        engine.abort(first.uid)
        engine.abort(first.uid)
        engine.abort(12345)
        second = request(engine.next_uid(), request_id="name", max_tokens=8)
        engine.submit(second)
        await sink.wait_for_end(second.uid)
    assert not sink.ends[first.uid]
    assert not sink.tokens[first.uid]


@both
@in_loop
async def test_what_is_refused_brings_no_event(kind: str) -> None:
    sink = RecordingSink()
    async with engine_of(kind, sink) as engine:
        with pytest.raises(InvalidRequest, match="max_tokens"):
            engine.submit(request(engine.next_uid(), max_tokens=1000))
        good = request(engine.next_uid(), max_tokens=2)
        engine.submit(good)
        await sink.wait_for_end(good.uid)
    assert set(sink.tokens) == {good.uid}


@both
@in_loop
async def test_the_policy_is_compared_and_set(kind: str) -> None:
    async with engine_of(kind, RecordingSink()) as engine:
        before = engine.policy
        after = await engine.set_policy(Off(), before.revision)
        assert engine.policy == after
        assert (after.policy, after.revision) == (Off(), before.revision + 1)
        with pytest.raises(StaleRevision):
            await engine.set_policy(Fixed(1), before.revision)
        with pytest.raises(InvalidRequest):
            await engine.set_policy(Fixed(5), None)
        assert engine.policy == after


@both
@in_loop
async def test_the_engine_describes_itself_and_serves(kind: str) -> None:
    async with engine_of(kind, RecordingSink()) as engine:
        assert engine.is_serving
        assert engine.description == describe()
        assert engine.mesh == ONE_RANK
        assert engine.next_uid() < engine.next_uid()
