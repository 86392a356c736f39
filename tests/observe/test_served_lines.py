"""One line per call, through real engine and front, whatever becomes of the call; and its names in other lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.collector import collecting
from fakes.front import TOKENIZER, in_loop, request_for, status_of
from fakes.moments import TRACEPARENT
from fakes.worker import FakeSource, describe

from configs.load import load_settings
from configs.schema import ServeSettings
from runtime.engine import Engine
from runtime.front.client import OutriderClient
from runtime.front.defaults import SamplingDefaults
from runtime.front.hub import StreamHub
from runtime.front.server import FrontServer
from runtime.in_force import SettingsInForce
from runtime.observe.observation import Observation
from runtime.observe.records import RequestRecord
from runtime.reload import Reloader
from runtime.stream.text_stream import TextStream

LINES = "outrider.requests"


class Overheard(Observation):
    """told: request ids, as the server hears of their ends."""

    def __init__(self, settings: ServeSettings) -> None:
        super().__init__(settings)
        self.told: asyncio.Queue[str] = asyncio.Queue()

    def note_request(self, record: RequestRecord) -> None:
        super().note_request(record)
        self.told.put_nowait(record.request_id)


@asynccontextmanager
async def served(
    caplog: pytest.LogCaptureFixture,
    told: list[asyncio.Queue[str]] | None = None,
    *,
    gated: bool = False,
    **settings: Any,
) -> AsyncIterator[OutriderClient]:
    """A client of a whole server but for its ranks. On leaving all has been written. told: is given the queue of
    Overheard. gated: no step answers."""
    caplog.set_level(logging.INFO)
    overrides = {"server.port": 0, "speculation.gamma": 3, "speculation.gamma_max": 4}
    in_force = SettingsInForce(
        load_settings(None, overrides | {key.replace("__", "."): value for key, value in settings.items()})
    )
    observation = Overheard(in_force.now)
    if told is not None:
        told.append(observation.told)
    observation.spell_with(TOKENIZER.decode)
    hub = StreamHub(in_force)
    source = FakeSource(describe(vocab_size=4096, num_pages=(64, 64), max_model_len=120), gated=gated)
    engine = Engine(in_force, source, hub, observer=observation)
    front = FrontServer(in_force, Reloader(in_force), observation)
    try:
        await front.listen()
        await engine.start()
        await front.open(engine, hub, TOKENIZER, defaults=SamplingDefaults())
        async with OutriderClient(front.address) as client:
            yield client
    finally:
        await front.stop(0)
        await engine.stop(0)
        await observation.close()


def lines(caplog: pytest.LogCaptureFixture) -> dict[str, dict[str, Any]]:
    """By request id; of each there is one."""
    found = [vars(record) for record in caplog.records if record.name == LINES]
    by_id = {line.get("request_id", ""): line for line in found}
    assert len(by_id) == len(found)
    return by_id


async def drawn(call: Any) -> int:
    return sum([len(frame.token_ids) async for frame in call])


@in_loop
async def test_every_call_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    told: list[asyncio.Queue[str]] = []
    async with served(caplog, told) as client:
        traced = (("x-request-id", "fine"), ("traceparent", TRACEPARENT))
        num_drawn = await drawn(client.call(request_for(max_tokens=9), metadata=traced))
        await drawn(client.call(request_for(request_id="two", max_tokens=5, n=2)))
        await status_of(client.generate(request_for(request_id="bad", max_tokens=0)))
        await status_of(client.generate(request_for(request_id=" ")))
        await status_of(client.generate(request_for(request_id="wrong", model="another")))
        leaving = client.generate(request_for(request_id="left", ids=(5,), max_tokens=100, ignore_eos=True))
        await anext(leaving)
        await leaving.aclose()
        while await told[0].get() != "left":
            pass
    found = lines(caplog)
    assert {name: line["code"] for name, line in found.items()} == {
        "fine": "OK",
        "two": "OK",
        "bad": "INVALID_ARGUMENT",
        "": "INVALID_ARGUMENT",
        "wrong": "NOT_FOUND",
        "left": "CANCELLED",
    }
    fine = found["fine"]
    assert fine["trace_id"] == TRACEPARENT[3:35]
    assert (fine["completion_tokens"], fine["prompt_tokens"]) == (num_drawn, 1)
    assert 0 <= fine["queue_ms"] <= fine["ttft_ms"] <= fine["total_ms"]
    assert (fine["identity"], fine["face"]) == ("anyone", "outrider.v1.InferenceService")
    assert (found["two"]["n"], found["two"]["completion_tokens"]) == (2, 10)
    assert not any({"prompt", "outputs"} & line.keys() for line in found.values())


@in_loop
async def test_a_deadline_that_passed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[asyncio.Queue[str]] = []
    async with served(caplog, told, gated=True) as client, asyncio.timeout(30):
        code, _ = await status_of(client.call(request_for(request_id="late", max_tokens=9), timeout=0.3))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await told[0].get()
    assert lines(caplog)["late"]["code"] == "DEADLINE_EXCEEDED"


@in_loop
async def test_texts_where_they_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    async with served(caplog, logs__texts=True) as client:
        frames = [frame async for frame in client.generate(request_for(text="def main(", max_tokens=6))]
    [line] = lines(caplog).values()
    assert line["prompt"] == "def main("
    assert line["outputs"] == ["".join(frame.text for frame in frames)]


@in_loop
async def test_no_lines_where_none_are_wanted(caplog: pytest.LogCaptureFixture) -> None:
    async with served(caplog, logs__requests=False) as client:
        await drawn(client.call(request_for(max_tokens=3)))
    assert lines(caplog) == {}


@in_loop
async def test_a_defect_in_one_stream_is_logged_under_its_name(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's task, which knows nothing of calls, is the one that meets it."""
    import structlog

    names: list[Any] = []

    def fail(stream: TextStream, event: object) -> None:
        names.append(structlog.contextvars.get_contextvars())
        raise KeyError("a defect")

    monkeypatch.setattr(TextStream, "take", fail)
    async with served(caplog) as client:
        code, _ = await status_of(client.generate(request_for(request_id="unlucky", max_tokens=9)))
    assert code is grpc.StatusCode.INTERNAL
    assert lines(caplog)["unlucky"]["code"] == "INTERNAL"
    assert lines(caplog)["unlucky"]["levelname"] == "ERROR"
    assert names[0]["request_id"] == "unlucky"


@in_loop
async def test_a_slow_reader_is_told_by_its_code(caplog: pytest.LogCaptureFixture) -> None:
    async with served(caplog, server__max_frame_tokens_unread=1) as client:
        slow = client.generate(request_for(request_id="slow", max_tokens=100, ignore_eos=True, stop=["never"]))
        code, _ = await status_of(slow)
    # Whether it falls behind is a race with the client; that both sides say the same is none.
    assert lines(caplog)["slow"]["code"] == ("OK" if code is grpc.StatusCode.OK else code.name)


@in_loop
async def test_a_served_call_is_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    with collecting() as collector:
        async with served(caplog, tracing__endpoint=collector.endpoint, tracing__step_sample=1.0) as client:
            metadata = (("traceparent", TRACEPARENT), ("tracestate", "vendor=v"))
            await drawn(client.call(request_for(max_tokens=9), metadata=metadata))
            await asyncio.sleep(0)
        spans = collector.spans
    whole = spans["text_completion demo"]
    assert whole.trace_id.hex() == TRACEPARENT[3:35]
    assert whole.trace_state == "vendor=v"
    assert {"queue", "prefill", "decode", "step"} <= spans.keys()
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(span.parent_span_id == whole.span_id for span in phases)
    assert all(
        whole.start_time_unix_nano - 1000 <= span.start_time_unix_nano <= span.end_time_unix_nano for span in phases
    )


def test_the_bundled_settings_have_logs_as_they_are_documented(tmp_path: Path) -> None:
    settings = load_settings(None, {"state_dir": tmp_path})
    assert (settings.logs.requests, settings.logs.texts, settings.logs.level) == (True, False, "info")
    assert settings.tracing.endpoint is None
