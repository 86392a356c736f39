"""What the front relies on, asked of the real engine and of the fake that the other tests here stand on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
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
from runtime.front.errors import AbortedByOperator, DuplicateRequest, InvalidRequest, StaleRevision, Unavailable
from runtime.in_force import SettingsInForce
from runtime.request import Finish, FinishReason
from runtime.verification.policy import Fixed, Off
from workers.demands import Constraint

NO_PROBLEMS: Mapping[Constraint, str] = {}
both = pytest.mark.parametrize("kind", ["real", "fake"])


@asynccontextmanager
async def engine_of(
    kind: str,
    sink: RecordingSink,
    *,
    clock: Callable[[], float] = time.monotonic,
    problems: Mapping[Constraint, str] = NO_PROBLEMS,
) -> AsyncIterator[EngineLink]:
    """A serving engine that emits `true_stream` of each request."""
    if kind == "real":
        source = FakeSource(describe())
        engine = Engine(SettingsInForce(load_settings(None, {})), source, sink, clock=clock)
        await engine.start()
        source.group.problems = {constraint.text: problem for constraint, problem in problems.items()}
        yield engine
        await engine.stop(0)
        return
    fake = FakeEngine(sink, true_stream, description=describe(), clock=clock)
    fake.problems = dict(problems)
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
async def test_a_request_whose_time_is_up_ends_with_what_is_there_wherever_it_is(kind: str) -> None:
    """Three run, and one waits for their pages. Time passes once the first tokens are told."""
    sink = RecordingSink()
    async with engine_of(kind, sink, clock=lambda: float(bool(sink.batches))) as engine:
        uids = [engine.next_uid() for _ in range(4)]
        for uid in uids:
            engine.submit(request(uid, max_tokens=8, stop_strings=("x",), time_limit_s=0.5))
        await sink.wait_for_end(*uids)
        counted = engine.status().statistics.requests
    assert [sink.end_of(uid) for uid in uids] == [Finish(reason=FinishReason.TIME_LIMIT)] * 4
    assert [bool(sink.tokens[uid]) for uid in uids] == [True, True, True, False]
    assert counted.ended == {FinishReason.TIME_LIMIT: 4}
    assert counted.output_tokens.total == sum(map(len, sink.tokens.values()))
    assert all(usage.completion == len(sink.tokens[uid]) for uid, usage in sink.usage.items())
    assert all(event.needs_verdict for event in sink.token_events)


@both
@in_loop
async def test_what_cannot_be_prepared_is_refused_by_its_field(kind: str) -> None:
    wrong, fine = (Constraint(kind="lark", text=text) for text in ("start: rule", "start: /a/"))
    async with engine_of(kind, RecordingSink(), problems={wrong: "no such rule"}) as engine:
        assert await engine.prepare(fine) is None
        with pytest.raises(InvalidRequest, match=r"^constraint\.lark: no such rule$"):
            await engine.prepare(wrong)
        assert engine.status().statistics.requests.refused["InvalidRequest"] == 1
        engine.drain()
        with pytest.raises(Unavailable, match="draining"):
            await engine.prepare(fine)


@both
@in_loop
async def test_the_policy_is_compared_and_set(kind: str) -> None:
    async with engine_of(kind, RecordingSink()) as engine:
        before = engine.policies.state
        after = await engine.policies.set(Off(), before.revision)
        assert engine.policies.state == after
        assert (after.policy, after.revision) == (Off(), before.revision + 1)
        with pytest.raises(StaleRevision):
            await engine.policies.set(Fixed(1), before.revision)
        with pytest.raises(InvalidRequest):
            await engine.policies.set(Fixed(5), None)
        assert engine.policies.state == after


@both
@in_loop
async def test_the_engine_describes_itself_and_serves(kind: str) -> None:
    async with engine_of(kind, RecordingSink()) as engine:
        assert engine.is_serving
        assert engine.description == describe()
        assert engine.mesh == ONE_RANK
        assert engine.next_uid() < engine.next_uid()


@both
@in_loop
async def test_a_family_is_submitted_once_and_has_streams_usage_and_a_name_together(kind: str) -> None:
    sink = RecordingSink()
    async with engine_of(kind, sink) as engine:
        uid = engine.next_uid(3)
        family = request(uid, num_prompt=6, max_tokens=5, n=3, request_id="name")
        engine.submit(family)
        with pytest.raises(DuplicateRequest):
            engine.submit(request(engine.next_uid(), request_id="name"))
        await sink.wait_for_end(uid, uid + 1, uid + 2)
        engine.submit(again := request(engine.next_uid(), max_tokens=2, request_id="name"))
        await sink.wait_for_end(again.uid)
        with pytest.raises(InvalidRequest) as refusal:
            engine.submit(request(engine.next_uid(5), n=5))
        assert refusal.value.field == "n"
        many = request(engine.next_uid(2), num_prompt=6, max_tokens=5, n=2)
        engine.submit(many)
        assert engine.abort_by_id([many.request_id]).aborted == (many.request_id,)
    assert [tuple(sink.tokens[uid + i]) for i in range(3)] == [true_stream(family)] * 3
    assert [sink.usage[uid + i].cached for i in range(3)] == [0, 5, 5]
    assert len({sink.usage[uid + i].seed for i in range(3)}) == 3
    assert all(isinstance(sink.end_of(many.uid + i), AbortedByOperator) for i in range(2))
