"""Metrics over HTTP: served from start to stop, to some and to many, and to those who say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable

import pytest
from fakes.a_moment import a_moment
from fakes.engine_house import House, asynchronous, house
from fakes.requests import request
from oracles.metric_laws import check_laws, parse

from configs.load import load_settings
from runtime.front import metrics_server
from runtime.front.metrics_server import MetricsServer, metrics_endpoint
from runtime.status import FrontStatus, Moment


async def fetch(address: str | None, path: str = "/metrics") -> str:
    assert address is not None

    def get() -> str:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return str(answer.read(), "utf-8")

    return await asyncio.to_thread(get)


def settings_with(**changes: object):
    return load_settings(None, {"server.port": 0} | {key.replace("__", "."): value for key, value in changes.items()})


def look_at(h: House) -> Callable[[], Moment]:
    return lambda: Moment(engine=h.engine.status(), front=FrontStatus())


@asynchronous
async def test_metrics_are_served_until_they_are_stopped() -> None:
    async with house() as h:
        server = MetricsServer(settings_with(model__served_name="my model"), look_at(h))
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


@contextlib.asynccontextmanager
async def impatient() -> AsyncIterator[None]:
    """Silence is borne for a moment only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_server._Handler, "timeout", 0.5)
        yield


@contextlib.asynccontextmanager
async def served(look: Callable[[], Moment]) -> AsyncIterator[MetricsServer]:
    server = MetricsServer(settings_with(), look)
    server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynchronous
async def test_the_engine_is_looked_at_from_its_own_loop_once_a_scrape() -> None:
    looks = []

    def look() -> Moment:
        looks.append(threading.current_thread())
        return a_moment()

    async with served(look) as server:
        await fetch(server.address)
        await fetch(server.address)
    assert looks == [threading.current_thread()] * 2


@asynchronous
async def test_a_scrape_may_ask_for_some_metrics() -> None:
    async with served(a_moment) as server:
        found = parse(await fetch(server.address, "/metrics?name[]=outrider_steps_total"))
        assert found == {"outrider_steps_total": {(): 71}}


ACCEPTED = (
    # Prometheus 2 and 3, and Go clients that read metrics themselves.
    "application/openmetrics-text;version=1.0.0;q=0.75,application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=0.0.4;q=0.4,*/*;q=0.3",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;escaping=allow-utf-8",
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7,text/plain;q=0.3",
    "text/plain;version=0.0.4",
    "",
)


@pytest.mark.parametrize("accept", ACCEPTED)
@asynchronous
async def test_names_are_whole_whatever_format_a_scraper_prefers(accept: str) -> None:
    async with served(a_moment) as server:
        asked = urllib.request.Request(f"http://{server.address}/metrics", headers={"Accept": accept})

        def get() -> tuple[str, str]:
            with urllib.request.urlopen(asked, timeout=10) as answer:
                return answer.headers["Content-Type"], str(answer.read(), "utf-8")

        kind, text = await asyncio.to_thread(get)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    lines = text.splitlines()
    names = {line.split("{")[0] for line in lines if not line.startswith("#")}
    assert {"vllm:num_requests_waiting", "vllm:e2e_request_latency_seconds_bucket"} <= names
    assert not any(name.startswith("vllm_") for name in names)


@asynchronous
async def test_other_paths_are_not_found() -> None:
    async with served(a_moment) as server:
        for path in ("/", "/metric", "/metrics/more"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                await fetch(server.address, path)


@asynchronous
async def test_silent_connections_and_many_scrapers_do_not_choke_it() -> None:
    """Silent ones take all connections there are, until they are closed for it; scrapers wait and are answered."""
    async with impatient(), served(a_moment) as server:
        assert server.address is not None
        host, _, port = server.address.rpartition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(2 * metrics_server.MAX_CONNECTIONS):
                stack.enter_context(socket.create_connection((host, int(port))))
            answers = await asyncio.gather(*(fetch(server.address) for _ in range(20)))
            threads = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
            assert len(threads) <= metrics_server.MAX_CONNECTIONS
        assert all("outrider_steps_total" in answer for answer in answers)


@asynchronous
async def test_who_says_a_little_now_and_then_holds_a_connection_for_its_time_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTION_S", 0.5)
    async with served(a_moment) as server:
        assert server.address is not None
        host, _, port = server.address.rpartition(":")

        async def drip() -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /metrics HTTP/1.1\r\nX: ")
            end = asyncio.ensure_future(reader.read())
            while not end.done():
                writer.write(b"x")
                await asyncio.wait({end}, timeout=0.05)
            with contextlib.suppress(ConnectionError):
                await end
            writer.close()

        drips = [asyncio.create_task(drip()) for _ in range(metrics_server.MAX_CONNECTIONS)]
        await asyncio.sleep(0.2)
        assert "outrider_steps_total" in await fetch(server.address)
        await asyncio.gather(*drips)


@asynchronous
async def test_a_server_that_is_full_stops() -> None:
    with contextlib.ExitStack() as stack:
        async with impatient(), served(a_moment) as server:
            assert server.address is not None
            host, _, port = server.address.rpartition(":")
            for _ in range(metrics_server.MAX_CONNECTIONS + 3):
                stack.enter_context(socket.create_connection((host, int(port))))


@asynchronous
async def test_a_taken_port_is_told_with_its_setting() -> None:
    async with house() as h:
        first = MetricsServer(settings_with(), look_at(h))
        first.start()
        assert first.address is not None
        port = int(first.address.rpartition(":")[2])
        try:
            with pytest.raises(OSError, match=r"metrics cannot listen on .*metrics\.port"):
                MetricsServer(settings_with(metrics__port=port), look_at(h)).start()
        finally:
            await first.stop()


@asynchronous
async def test_none_serves_none() -> None:
    async with house() as h:
        server = MetricsServer(settings_with(metrics__port="none"), look_at(h))
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
