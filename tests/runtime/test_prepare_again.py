"""New ranks have compiled nothing: what waits over a restart has its constraint made ready again before it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from fakes.engine_house import LENGTH, SETTINGS, House, asynchronous, house, settle_down
from fakes.requests import request
from fakes.worker import FakeGroup

from runtime.front.errors import InvalidRequest, Unavailable
from runtime.request import Finish, FinishReason, Request
from workers.demands import Constraint
from workers.plan import WorkerError, WorkerLost

RUNNING = 50
ROOMY = SETTINGS.model_copy(update={"scheduler": SETTINGS.scheduler.model_copy(update={"max_waiting": 9})})
A, B, C = (Constraint(kind="regex", text=text) for text in "abc")


def constrained(uid: int, constraint: Constraint | None, *, n: int = 1, time_limit_s: float | None = None) -> Request:
    made = request(uid, max_tokens=3, priority=-uid, n=n, time_limit_s=time_limit_s)
    return replace(made, sampling=replace(made.sampling, constraint=constraint))


@asynccontextmanager
async def waiting(*requests: Request) -> AsyncIterator[House]:
    """One request runs, the others wait; then the group is lost, and comes back when `release_restarts` is set."""
    async with house(num_slots=2, gated=True, settings=ROOMY) as h:
        h.engine.submit(request(RUNNING, n=2))
        await settle_down()
        for each in requests:
            h.engine.submit(each)
        h.source.hold_restarts = True
        h.source.group.lose(WorkerLost("gone"))
        await settle_down()
        assert isinstance(h.sink.end_of(RUNNING), Unavailable)
        yield h


async def come_back(h: House) -> None:
    h.source.release_restarts.set()
    await settle_down()


async def serve_all(h: House) -> None:
    while h.source.group.is_waiting:
        await h.step()


@asynchronous
async def test_each_constraint_once_in_the_order_of_service_before_anything_runs() -> None:
    async with waiting(constrained(1, B), constrained(2, None), constrained(3, A)) as h:
        prepare = FakeGroup.prepare

        async def watched(group: FakeGroup, constraint: Constraint) -> str:
            assert not h.engine.is_serving
            assert group.plans == []
            return await prepare(group, constraint)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FakeGroup, "prepare", watched)
            await come_back(h)
        assert h.source.group.prepared == [A, B]
        assert h.engine.is_serving
        await serve_all(h)
        assert [h.sink.end_of(uid) for uid in (1, 2, 3)] == [LENGTH] * 3


@asynchronous
async def test_sequences_and_requests_that_share_one_have_it_prepared_once() -> None:
    async with waiting(constrained(20, A, n=2), constrained(30, A)) as h:
        await come_back(h)
        assert h.source.group.prepared == [A]
        await serve_all(h)
        assert [h.sink.end_of(uid) for uid in (20, 21, 30)] == [LENGTH] * 3


@asynchronous
async def test_what_cannot_be_made_ready_now_fails_by_itself() -> None:
    async with waiting(constrained(10, B, n=2), constrained(20, A), constrained(30, C)) as h:
        h.source.problems["b"] = "it takes too much"
        h.source.prepare_errors["a"] = WorkerError("rank 0 is busy")
        await come_back(h)
        for uid in (10, 11):
            error = h.sink.end_of(uid)
            assert isinstance(error, InvalidRequest)
            assert (error.field, error.problem) == ("constraint.regex", "it takes too much")
        busy = h.sink.end_of(20)
        assert isinstance(busy, Unavailable)
        assert "rank 0 is busy" in str(busy)
        await serve_all(h)
        assert h.sink.end_of(30) == LENGTH
        assert len(h.source.groups) == 2


@asynchronous
async def test_a_group_that_is_lost_meanwhile_costs_no_request_and_the_next_one_prepares() -> None:
    async with waiting(constrained(1, A), constrained(2, B)) as h:
        prepare = FakeGroup.prepare

        async def dies(group: FakeGroup, constraint: Constraint) -> str:
            if group.epoch == 2:
                group.lose(WorkerLost("gone again"))
            return await prepare(group, constraint)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FakeGroup, "prepare", dies)
            await come_back(h)
            await settle_down()
        assert [group.prepared for group in h.source.groups[1:]] == [[], [B, A]]
        assert h.states == [True, False, True], "nobody was told that the second life served"
        await serve_all(h)
        assert [h.sink.end_of(uid) for uid in (1, 2)] == [LENGTH] * 2


@asynchronous
async def test_lives_that_end_before_they_serve_are_one_outage_and_nobody_waits_for_all_of_them() -> None:
    """What takes a rank along wherever it is made ready would else keep the server from ever coming back."""
    async with waiting(constrained(1, A)) as h:
        prepare = FakeGroup.prepare

        async def dies(group: FakeGroup, constraint: Constraint) -> str:
            h.now_s += ROOMY.cluster.start_timeout_s / 2 + 1
            group.lose(WorkerLost("gone again"))
            return await prepare(group, constraint)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FakeGroup, "prepare", dies)
            await come_back(h)
            for _ in range(5):
                await settle_down()
        assert isinstance(h.sink.end_of(1), Unavailable)
        assert h.states == [True, False, True]
        assert h.engine.status().losses.count == 1


@asynchronous
async def test_whose_time_is_up_meanwhile_ends_then() -> None:
    async with waiting(constrained(1, A, time_limit_s=0.01), constrained(2, B)) as h:
        prepare = FakeGroup.prepare

        async def slow(group: FakeGroup, constraint: Constraint) -> str:
            h.now_s = 1.0
            await h.sink.wait_for_end(1)
            return await prepare(group, constraint)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FakeGroup, "prepare", slow)
            h.source.release_restarts.set()
            await h.sink.wait_for_end(1)
            await settle_down()
        assert h.sink.end_of(1) == Finish(reason=FinishReason.TIME_LIMIT)
        assert h.source.group.prepared == [B]
        await serve_all(h)


@asynchronous
async def test_who_leaves_meanwhile_has_nothing_prepared() -> None:
    async with waiting(constrained(1, A), constrained(2, B), constrained(3, C)) as h:
        prepare = FakeGroup.prepare

        async def others_leave(group: FakeGroup, constraint: Constraint) -> str:
            h.engine.abort(2)
            return await prepare(group, constraint)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FakeGroup, "prepare", others_leave)
            await come_back(h)
        assert h.source.group.prepared == [C, A]
        await serve_all(h)
