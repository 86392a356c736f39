"""The metrics: what they say is what the engine did, in every scrape, and their names are what routers look for."""

from __future__ import annotations

import asyncio
import contextlib
import random
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.engine_house import SETTINGS, House, asynchronous, house, settle_down
from fakes.requests import request
from oracles.metric_laws import Scrape, check_laws, check_rise, parse
from prometheus_client import CollectorRegistry, generate_latest

from configs.load import load_settings
from runtime.front.errors import Overloaded, Unavailable
from runtime.front.metrics_server import MetricsServer, metrics_endpoint
from runtime.histogram import Histogram
from runtime.status import EngineStatus
from runtime.telemetry import METRICS, EngineCollector, HistogramRow, Row
from runtime.verification.policy import Fixed, Off
from workers.plan import WorkerLost

ROUTERS_LOOK_FOR = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_success",
}


def scrape(look: Callable[[], EngineStatus]) -> Scrape:
    registry = CollectorRegistry()
    registry.register(EngineCollector("a model", look))
    return parse(generate_latest(registry).decode())


def test_names_are_unique_and_routers_find_theirs():
    names = [row.name for row in METRICS]
    assert len(set(names)) == len(names)
    assert {name.removesuffix("_total") for name in names} >= ROUTERS_LOOK_FOR
    assert all(name.startswith(("vllm:", "outrider_")) for name in names)


def test_the_documents_tell_every_metric():
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    rows = [f"| `{row.name}` | {_kind(row)} | {row.meaning} |" for row in METRICS]
    assert [row for row in rows if row not in text] == []
    assert text.count("| `vllm:") + text.count("| `outrider_") == len(rows)


def _kind(row: Row | HistogramRow) -> str:
    return "histogram" if isinstance(row, HistogramRow) else row.kind.name.lower()


@asynchronous
async def test_a_finished_request_is_told_with_its_times() -> None:
    async with house(gated=True) as h:
        await h.engine.set_policy(Off())
        h.now_s = 100.0
        h.engine.submit(request(1, num_prompt=4, max_tokens=3))
        h.now_s = 102.0
        await settle_down()  # it has its slot, and its first step waits
        found = scrape(h.engine.status)
        check_laws(found)
        assert found["vllm:num_requests_running"] == {(): 1}
        assert found["vllm:prompt_tokens_total"] == {(): 0}
        for now_s in (105.0, 106.0, 107.0):
            h.now_s = now_s
            await h.step()
        await h.sink.wait_for_end(1)
        found = scrape(h.engine.status)
        check_laws(found)
        assert found["vllm:time_to_first_token_seconds_sum"] == {(): 5.0}
        assert found["vllm:request_queue_time_seconds_sum"] == {(): 2.0}
        assert found["vllm:request_prefill_time_seconds_sum"] == {(): 3.0}
        assert found["vllm:request_decode_time_seconds_sum"] == {(): 2.0}
        assert found["vllm:e2e_request_latency_seconds_sum"] == {(): 7.0}
        assert found["vllm:inter_token_latency_seconds_sum"] == {(): 2.0}
        assert found["vllm:inter_token_latency_seconds_count"] == {(): 2}
        assert found["vllm:prompt_tokens_total"] == {(): 4}
        assert found["vllm:generation_tokens_total"] == {(): 3}
        assert found["vllm:request_generation_tokens_bucket"][("2.0",)] == 0
        assert found["vllm:request_generation_tokens_bucket"][("5.0",)] == 1
        assert found["vllm:request_success_total"] == {("stop",): 0, ("length",): 1, ("abort",): 0, ("error",): 0}
        assert found["outrider_gamma_current"] == {(): 0}
        assert found["outrider_gamma_changes_total"] == {(): 1}
        assert found["outrider_policy"] == {("off",): 1, ("fixed",): 0}


@asynchronous
async def test_refusals_are_told_by_reason() -> None:
    async with house(gated=True) as h:
        for uid in range(1, 8):
            h.engine.submit(request(uid, max_tokens=2))
        with pytest.raises(Overloaded):
            h.engine.submit(request(8, max_tokens=2))
        h.engine.drain()
        for uid in (9, 10):
            with pytest.raises(Unavailable):
                h.engine.submit(request(uid, max_tokens=2))
        found = scrape(h.engine.status)
        check_laws(found)
        assert found["outrider_requests_refused_total"] == {("Overloaded",): 1, ("Unavailable",): 2}
        assert found["outrider_requests_submitted_total"] == {(): 7}
        assert found["outrider_state"][("draining",)] == 1


@pytest.mark.parametrize("dp", [1, 2])
def test_laws_hold_under_load_cancellation_loss_and_changes_of_policy(dp: int) -> None:
    """A random hour of an operator: every scrape in it obeys, and counters only rise."""
    chance = random.Random(dp)

    async def act(h: House, uid: int) -> None:
        match chance.randrange(8):
            case 0:
                h.engine.abort(chance.randint(1, uid))
            case 1:
                h.engine.abort_by_id([f"r{chance.randint(1, uid)}", "nobody"])
            case 2:
                await h.engine.set_policy(chance.choice([Off(), Fixed(1), Fixed(4)]))
            case 3 if h.source.group.is_waiting and chance.random() < 0.2:
                h.source.group.lose(WorkerLost("a test"))
            case 4:
                (h.engine.drain if chance.random() < 0.3 else h.engine.resume)()

    @asynchronous
    async def scenario() -> None:
        async with house(dp=dp, gated=True) as h:
            before = scrape(h.engine.status)
            for uid in range(1, 150):
                h.now_s += chance.random()
                with contextlib.suppress(Overloaded, Unavailable):
                    h.engine.submit(request(uid, num_prompt=chance.randint(1, 9), max_tokens=chance.randint(1, 9)))
                await act(h, uid)
                for _ in range(chance.randrange(4)):
                    if h.source.group.is_waiting:
                        await h.step()
                    await settle_down()
                after = scrape(h.engine.status)
                check_laws(after)
                check_rise(before, after)
                before = after
            ended = before["outrider_requests_ended_total"]
            assert all(ended[(end,)] for end in ("length", "aborted", "failed")), ended
            assert before["outrider_restarts_total"][()] > 0
            assert before["outrider_trimmed_tokens_total"][()] > 0
            h.source.group.gated = False

    scenario()


def test_a_histogram_counts_up_to_and_including_its_bounds():
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 100.0):
        histogram.observe(value)
    view = histogram.view()
    assert (view.counts, view.total, view.count) == ((2, 2, 2), 107.5, 6)


# Over HTTP.


async def fetch(address: str | None) -> str:
    assert address is not None

    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            return str(answer.read(), "utf-8")

    return await asyncio.to_thread(get)


def settings_with(**changes: object):
    return load_settings(None, {"server.port": 0} | {key.replace("__", "."): value for key, value in changes.items()})


@asynchronous
async def test_metrics_are_served_until_they_are_stopped() -> None:
    async with house() as h:
        server = MetricsServer(settings_with(model__served_name="my model"), h.engine.status)
        server.start()
        address = server.address
        try:
            text = await fetch(address)
            assert 'outrider_steps_total{model_name="my model"} 0.0' in text
            assert "process_resident_memory_bytes" in text
            h.engine.submit(request(1, max_tokens=3))
            await h.sink.wait_for_end(1)
            found = parse(await fetch(address))
            check_laws(found)
            assert found["vllm:generation_tokens_total"] == {(): 3}
        finally:
            await server.stop()
            await server.stop()
        assert server.address is None
        with pytest.raises(urllib.error.URLError):
            await fetch(address)


@asynchronous
async def test_a_taken_port_is_told_with_its_setting() -> None:
    async with house() as h:
        first = MetricsServer(settings_with(), h.engine.status)
        first.start()
        assert first.address is not None
        port = int(first.address.rpartition(":")[2])
        try:
            with pytest.raises(OSError, match=r"metrics cannot listen on .*metrics\.port"):
                MetricsServer(settings_with(metrics__port=port), h.engine.status).start()
        finally:
            await first.stop()


@asynchronous
async def test_none_serves_none() -> None:
    async with house() as h:
        server = MetricsServer(settings_with(metrics__port="none"), h.engine.status)
        server.start()
        assert server.address is None
        await server.stop()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"server.port": 50051}, ("127.0.0.1", 50052)),
        ({"server.port": 0}, ("127.0.0.1", 0)),
        ({"server.port": 65535}, ("127.0.0.1", 0)),
        ({"server.port": 50051, "metrics.port": 9000, "metrics.host": "::1"}, ("::1", 9000)),
        ({"server.port": 50051, "metrics.port": "none"}, ("127.0.0.1", None)),
    ],
)
def test_the_endpoint_follows_the_settings(given, expected):
    assert metrics_endpoint(load_settings(None, given)) == expected


assert SETTINGS.scheduler.max_waiting == 3, "the refusals above count on it"
