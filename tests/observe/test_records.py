"""Records of requests: one for each call that asks for tokens, whatever becomes of it, with what it used and when."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from fakes.engine_house import asynchronous, no_pause, settle_down
from fakes.front import in_loop, request_for, serving, status_of
from fakes.front_sink import RecordingSink
from fakes.requests import request
from fakes.worker import FakeSource, describe, true_stream

from configs.schema import SchedulerSettings, ServeSettings, SpeculationSettings
from runtime.engine import Engine
from runtime.front.errors import InvalidRequest, SlowReader
from runtime.front.inference_service import FACE
from runtime.in_force import SettingsInForce
from runtime.observe.calls import recorded
from runtime.observe.records import RequestRecord, StepRecord
from runtime.request import Origin
from workers.plan import WorkerLost

SETTINGS = ServeSettings(
    scheduler=SchedulerSettings(max_step_tokens=32, max_waiting=3),
    speculation=SpeculationSettings(gamma=3, gamma_max=4),
)
CALLER = Origin(identity="gateway", face=FACE)


@dataclass
class Witness:
    """Keeps what it hears."""

    keeps_tokens: bool = True
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    def note_request(self, record: RequestRecord) -> None:
        self.requests.append(record)

    def note_step(self, record: StepRecord) -> None:
        self.steps.append(record)


class Watched:
    """A started engine on gated ranks, with a clock that stands still, and who watches it."""

    def __init__(self, keeps_tokens: bool = True, **changes: object) -> None:
        self.now_s = 100.0
        self.witness = Witness(keeps_tokens)
        self.source = FakeSource(describe(**changes), gated=True)
        self.sink = RecordingSink()
        self.engine = Engine(
            SettingsInForce(SETTINGS),
            self.source,
            self.sink,
            observer=self.witness,
            pause=no_pause,
            clock=lambda: self.now_s,
        )

    async def __aenter__(self) -> Watched:
        await self.engine.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.engine.stop(drain_s=0)

    async def step(self) -> None:
        """Lets the step in flight answer, a second later."""
        await settle_down()
        self.now_s += 1
        self.source.group.let_go()
        await settle_down()


@asynchronous
async def test_a_finished_request_is_told_once_with_its_times_and_counts() -> None:
    async with Watched() as w:
        asked = replace(request(1, num_prompt=5, max_tokens=6), origin=CALLER)
        w.engine.submit(asked)
        while not w.witness.requests:
            await w.step()
        [record] = w.witness.requests
        assert (record.request_id, record.origin, record.code) == (asked.request_id, CALLER, "OK")
        assert (record.ends, record.n, record.error) == (("length",), 1, "")
        assert record.usage == w.sink.usage[1]
        assert record.usage is not None
        assert (record.usage.prompt, record.usage.completion) == (5, 6)
        assert record.submitted_s == 100.0
        assert record.started_s == 100.0, "it was alone"
        assert record.first_token_s == 101.0
        assert record.last_token_s == record.ended_s == 100.0 + len(w.witness.steps)
        assert record.prompt == asked.prompt
        assert record.outputs == (true_stream(asked),)


@asynchronous
async def test_of_steps_the_rows_and_the_fate_of_drafts_are_told() -> None:
    async with Watched() as w:
        w.engine.submit(request(1, num_prompt=5, max_tokens=6))
        while not w.witness.requests:
            await w.step()
        first, second, *_ = w.witness.steps
        assert [step.is_first for step in w.witness.steps] == [True] + [False] * (len(w.witness.steps) - 1)
        assert (first.num_rows, first.num_prompt_rows, first.num_drafted, first.num_emitted) == (5, 5, 0, 1)
        assert (second.num_prompt_rows, second.num_drafted) == (0, 3)
        assert second.num_rows == 1 + second.num_admitted
        usage = w.witness.requests[0].usage
        assert usage is not None
        assert sum(step.num_drafted for step in w.witness.steps) == usage.drafted
        assert sum(step.num_admitted for step in w.witness.steps) == usage.admitted
        assert sum(step.num_accepted for step in w.witness.steps) == usage.accepted
        assert sum(step.num_emitted for step in w.witness.steps) == usage.completion
        assert all(step.took_s > 0 for step in w.witness.steps)


@asynchronous
async def test_several_sequences_are_one_record_with_sums_at_the_end_of_the_last() -> None:
    async with Watched() as w:
        asked = replace(request(1, num_prompt=4, max_tokens=4), n=3)
        w.engine.submit(asked)
        for _ in range(2):
            await w.step()
        w.engine.abandon(2, SlowReader("too slow"))
        assert w.witness.requests == []
        while not w.witness.requests:
            await w.step()
        [record] = w.witness.requests
        assert record.ends == ("length", "failed", "length")
        assert (record.n, record.code, record.error) == (3, "RESOURCE_EXHAUSTED", "too slow")
        assert record.usage is not None
        assert record.usage.prompt == 4, "they share it"
        assert record.usage.completion == sum(map(len, record.outputs))
        assert [len(output) for output in record.outputs][::2] == [4, 4]


@pytest.mark.parametrize(
    ("deadline_s", "code"), [(None, "CANCELLED"), (101.02, "DEADLINE_EXCEEDED"), (101.2, "CANCELLED")]
)
@asynchronous
async def test_an_end_at_the_deadline_is_told_from_one_before_it(deadline_s: float | None, code: str) -> None:
    """gRPC tells us the same of both. The client's timer runs a little ahead of ours."""
    origin = replace(CALLER, deadline_s=deadline_s)
    async with Watched() as w:
        w.engine.submit(replace(request(1, num_prompt=35, max_tokens=4), origin=origin))
        await w.step()
        w.engine.abort(1)
        assert [record.code for record in w.witness.requests] == [code]
    witness = Witness()
    moments = iter((100.0, 101.0))
    with pytest.raises(asyncio.CancelledError), recorded(witness, "one", origin, lambda: next(moments)):
        raise asyncio.CancelledError
    assert [record.code for record in witness.requests] == [code]


@pytest.mark.parametrize("at_step", [0, 1, 2])
@asynchronous
async def test_who_leaves_is_cancelled_wherever_that_happens(at_step: int) -> None:
    async with Watched() as w:
        w.engine.submit(request(1, num_prompt=35, max_tokens=4))
        for _ in range(at_step):
            await w.step()
        w.engine.abort(1)
        w.engine.abort(1)
        [record] = w.witness.requests
        assert (record.code, record.ends) == ("CANCELLED", ("aborted",))
        assert (record.first_token_s is None) == (at_step < 2), "the prompt takes two steps"


@asynchronous
async def test_an_operators_abort_and_a_lost_worker_have_their_codes() -> None:
    async with Watched() as w:
        for uid in (1, 2):
            w.engine.submit(request(uid, max_tokens=8))
        await w.step()
        w.engine.abort_by_id([request(1).request_id])
        await settle_down()
        w.source.group.lose(WorkerLost("the machine is on fire"))
        await settle_down()
        first, second = w.witness.requests
        assert (first.code, first.ends) == ("ABORTED", ("aborted",))
        assert (second.code, second.ends) == ("UNAVAILABLE", ("failed",))
        assert "on fire" in second.error


@asynchronous
async def test_tokens_are_not_kept_for_who_does_not_want_them() -> None:
    async with Watched(keeps_tokens=False) as w:
        w.engine.submit(request(1, max_tokens=3))
        while not w.witness.requests:
            await w.step()
        assert (w.witness.requests[0].prompt, w.witness.requests[0].outputs) == ((), ())


@asynchronous
async def test_what_the_engine_refuses_is_left_to_the_front_to_tell() -> None:
    async with Watched() as w:
        with pytest.raises(InvalidRequest):
            w.engine.submit(request(1, max_tokens=10**6))
        assert w.witness.requests == []


@in_loop
async def test_a_refused_call_is_told_with_its_code_and_field() -> None:
    witness = Witness()
    async with serving(observer=witness) as front:
        await status_of(front.client.generate(request_for(max_tokens=0, request_id="big")))
        await status_of(front.client.generate(request_for(request_id=" spaces ")))
        await status_of(front.client.generate(request_for(request_id="other", model="another")))
        frames = [frame async for frame in front.client.generate(request_for(max_tokens=2))]
    assert [(one.request_id, one.code, one.field) for one in witness.requests] == [
        ("big", "INVALID_ARGUMENT", "stopping.max_tokens"),
        ("", "INVALID_ARGUMENT", "request_id"),
        ("other", "NOT_FOUND", ""),
    ]
    assert frames, "of those that are taken in the engine tells"
    assert all(one.origin.face == FACE and one.ends == () and one.usage is None for one in witness.requests)
    assert all(one.ended_s >= one.submitted_s for one in witness.requests)


@pytest.mark.parametrize("stop_after", range(1, 8))
@asynchronous
async def test_tokens_behind_a_stop_string_are_not_among_the_output(stop_after: int) -> None:
    """Wherever in an accepted run it completes."""
    async with Watched() as w:
        asked = request(1, max_tokens=12, stop_strings=("x",))
        w.sink.stop_after[1] = stop_after
        w.engine.submit(asked)
        while not w.witness.requests:
            await w.step()
        [record] = w.witness.requests
        assert record.ends == ("stop_string",)
        assert record.outputs == (true_stream(asked)[:stop_after],)
        assert record.usage is not None
        assert record.usage.completion == stop_after
