"""What an operator sees over real gRPC: the status, the live requests, and what a check of the state finds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import metadata

import grpc
import grpc.aio
import pytest
from fakes.engine import DESCRIPTION
from fakes.front import Front, in_loop, request_for, serving, status_of

from outrider.v1 import operator_pb2
from parallel.mesh import Mesh
from runtime.live import EarlyEnd

Code = grpc.StatusCode
MESH = Mesh(dp=2, tp=2, ep=4)
TWO_SLOTS = replace(DESCRIPTION, num_slots=2)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def house(**options: object) -> AsyncIterator[tuple[Front, Clock]]:
    """A front that steps when told to, with its engine's clock."""
    clock = Clock()
    async with serving(steps_by_itself=False, clock=clock, **options) as front:
        yield front, clock


async def submit(front: Front, *request_ids: str, max_tokens: int = 12, **fields: object) -> list[grpc.aio.Call]:
    """Calls that are live, taken in one after another."""
    calls = []
    for request_id in request_ids:
        known = len(front.engine.submitted)
        calls.append(front.client.call(request_for(request_id=request_id, max_tokens=max_tokens, **fields)))
        await front.engine.until(lambda known=known: len(front.engine.submitted) == known + 1)
    return calls


def names(reply: operator_pb2.ListRequestsResponse) -> list[str]:
    return [status.request_id for status in reply.requests]


@in_loop
async def test_the_status_is_the_engines() -> None:
    async with house(mesh=MESH, description=TWO_SLOTS, max_waiting=7, run_length=9) as (front, clock):
        await submit(front, "a", "b", "c", "d", "e", max_tokens=400)
        await submit(front, "short", max_tokens=1, priority=-1)
        [gone] = await submit(front, "gone")
        gone.cancel()
        await front.engine.until(lambda: len(front.engine.live) == 6)
        front.engine.fail(front.engine.submitted[4].uid, RuntimeError("a defect"))
        await status_of(front.client.call(request_for(request_id="a", max_tokens=1)))
        clock.now_s += 12.5
        front.engine.step()
        await front.client.set_policy(2)
        status, reply = front.engine.status(), await front.client.get_status()
        statistics, ended = status.statistics, status.statistics.requests.ended

        assert reply.state == operator_pb2.SERVER_STATE_SERVING
        assert (reply.outage, reply.uptime_s) == ("", 12.5)
        assert reply.model == await front.client.get_model()
        assert (reply.model.dp, reply.model.tp, reply.model.ep) == (2, 2, 4)
        assert (reply.waiting, reply.max_waiting) == (1, 7) == (statistics.waiting, status.max_waiting)
        assert reply.policy == await front.client.get_policy()
        assert (reply.policy.policy.fixed.gamma, reply.policy.revision) == (2, 2)
        assert (reply.step, reply.epoch) == (1, 1) == (status.step, status.epoch)
        assert [(rank.rank, rank.name, rank.address, rank.device, rank.parameter_bytes) for rank in reply.ranks] == [
            (rank, f"fake-{rank}", f"fake:{rank + 1}", "cpu", 30_800_000) for rank in range(4)
        ]
        for use, batch in zip(statistics.dp_ranks, reply.batches, strict=True):
            assert (batch.running, batch.slots_used, batch.slots_total) == (use.running, use.slots_used, 2)
            # Both ranks of a batch hold a part of each.
            assert (batch.slot_bytes, batch.record_bytes) == (2 * 1000, 2 * 5000)
            assert [(pool.group, pool.page_bytes) for pool in batch.pools] == [("target", 128), ("drafter", 64)]
            assert [(pool.pages_used, pool.pages_total) for pool in batch.pools] == [
                (held.used, held.used + held.free) for held in use.pages
            ]
        assert [batch.running for batch in reply.batches] == [1, 2], "the short one has left"
        assert all(pool.pages_used > 0 and pool.pages_total == 1000 for pool in reply.batches[0].pools)

        counters, timings = reply.counters, statistics.timings
        assert (counters.steps, counters.rounds) == (1, 4) == (statistics.steps, statistics.rounds)
        assert counters.emitted == statistics.emitted == 3 * 9 + 1
        assert counters.trimmed == statistics.trimmed == 8
        assert counters.drafted_by_position == [4] * 8 == list(statistics.drafted_per_position)
        assert counters.admitted_by_position == list(statistics.admitted_per_position)
        assert counters.accepted_by_position == list(statistics.accepted_per_position)
        assert (counters.rank_s, counters.target_s) == (0.25, 0.125) == (timings.total_s, timings.target_s)
        assert (counters.execute_s, counters.host_s) == (0.5, 0.125) == (statistics.execute_s, statistics.host_s)
        assert (counters.submitted, counters.finished, counters.aborted, counters.failed) == (7, 1, 1, 1)
        assert (ended[EarlyEnd.ABORTED], ended[EarlyEnd.FAILED]) == (1, 1)
        assert counters.submitted == counters.finished + counters.aborted + counters.failed + len(front.engine.live)
        assert (counters.refused, counters.prompt_tokens, counters.restarts) == (1, 4, 0)


@in_loop
async def test_a_server_without_its_ranks_still_tells_its_status() -> None:
    async with house() as (front, _):
        await submit(front, "runs")
        front.engine.step()
        await submit(front, "waits")
        front.engine.set_serving(False)
        reply = await front.client.get_status()
        assert reply.state == operator_pb2.SERVER_STATE_RECOVERING
        assert reply.outage == "a rank has ended"
        assert [(rank.name, rank.address, rank.device) for rank in reply.ranks] == [("", "", "cpu")]
        assert (reply.waiting, reply.batches[0].running, reply.counters.failed) == (1, 0, 1)
        assert names(await front.client.list_requests()) == ["waits"]
        front.engine.set_serving(True)
        reply = await front.client.get_status()
        assert (reply.state, reply.outage, reply.epoch) == (operator_pb2.SERVER_STATE_SERVING, "", 2)
        assert (reply.ranks[0].name, reply.counters.restarts) == ("fake-0", 1)


@in_loop
async def test_versions_are_those_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    present = metadata.version

    def without_ray(name: str) -> str:
        if name == "ray":
            raise metadata.PackageNotFoundError(name)
        return present(name)

    async with serving() as front:
        versions = (await front.client.get_status()).versions
        assert set(versions) == {"outrider", "python", "grpc", "ray", "torch"}
        assert versions["grpc"] == grpc.__version__
        assert versions["outrider"] == (await front.client.get_model()).version == present("outrider")
    monkeypatch.setattr(metadata, "version", without_ray)
    async with serving() as front:
        assert set((await front.client.get_status()).versions) == {"outrider", "python", "grpc", "torch"}


@in_loop
async def test_requests_are_listed_in_order_with_what_they_have_so_far() -> None:
    async with house(description=TWO_SLOTS) as (front, clock):
        await submit(front, "a", "b", priority=3, max_tokens=30)
        clock.now_s += 2
        front.engine.step()
        clock.now_s += 5
        await submit(front, "late", priority=1)
        await submit(front, "urgent", priority=-2)
        clock.now_s += 0.5
        reply = await front.client.list_requests()
        assert (names(reply), reply.total) == (["a", "b", "urgent", "late"], 4)
        running, waiting = reply.requests[0], reply.requests[2]
        assert running.state == operator_pb2.REQUEST_STATE_DECODING
        assert (running.HasField("dp_rank"), running.dp_rank) == (True, 0)
        assert (running.priority, running.max_tokens) == (3, 30)
        assert (running.age_s, running.waited_s) == (7.5, 2)
        usage = front.engine.live[front.engine.submitted[0].uid].usage
        assert (running.usage.prompt_tokens, running.usage.completion_tokens, running.usage.accepted) == (1, 3, 2)
        assert (running.usage.rounds, running.usage.seed) == (usage.rounds, usage.seed)
        assert waiting.state == operator_pb2.REQUEST_STATE_WAITING
        assert not waiting.HasField("dp_rank")
        assert (waiting.priority, waiting.age_s, waiting.waited_s) == (-2, 0.5, 0.5)
        assert waiting.usage.completion_tokens == 0
        for limit in (1, 3):
            some = await front.client.list_requests(limit)
            assert (names(some), some.total) == (names(reply)[:limit], 4)


@in_loop
async def test_a_check_says_what_it_found_and_who_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.audit")
    async with house(mesh=MESH) as (front, _):
        sound = await front.client.check_integrity()
        assert (list(sound.violations), sound.ranks_checked) == ([], 4)
        [record] = caplog.records
        assert record.levelno == logging.INFO
        assert record.getMessage().endswith("had the state checked: all invariants hold")
        caplog.clear()
        front.engine.rank_violations[2].append("page 3 is held twice")
        found = await front.client.check_integrity()
        assert (list(found.violations), found.ranks_checked) == (["rank 2: page 3 is held twice"], 4)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "127.0.0.1:" in record.getMessage()
    assert record.getMessage().endswith("rank 2: page 3 is held twice")


@in_loop
async def test_a_check_without_ranks_is_unavailable() -> None:
    async with house() as (front, _):
        front.engine.set_serving(False)
        code, text = await status_of(front.client.check_integrity())
        assert (code, "a rank has ended" in text) == (Code.UNAVAILABLE, True)
        front.engine.set_serving(True)
        assert (await front.client.check_integrity()).ranks_checked == 1


@in_loop
async def test_a_check_that_takes_long_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with house() as (front, _):
        release, check = asyncio.Event(), front.engine.check_integrity

        async def checked_late() -> object:
            await release.wait()
            return await check()

        monkeypatch.setattr(front.engine, "check_integrity", checked_late)
        checking = asyncio.create_task(front.client.check_integrity())
        [call] = await submit(front, "a", max_tokens=3)
        front.engine.step()
        assert [len(frame.token_ids) async for frame in call] == [3]
        assert (await front.client.get_status()).counters.finished == 1
        assert not checking.done()
        release.set()
        assert (await checking).ranks_checked == 1
