"""Constraints are made ready by the ranks before what has them is queued; the engine tells why some are not."""

from __future__ import annotations

import asyncio

import pytest
from fakes.engine_house import LENGTH, SETTINGS, asynchronous, house, settle_down
from fakes.front_sink import RecordingSink
from fakes.requests import request
from fakes.worker import FakeSource

from runtime.engine import Engine
from runtime.front.errors import InvalidRequest, Unavailable
from runtime.in_force import SettingsInForce
from workers.demands import Constraint
from workers.plan import WorkerError, WorkerLost

GOOD = Constraint(kind="regex", text="[a-z]+")


@pytest.mark.parametrize("kind", ["json_schema", "json_object", "regex", "lark", "choice"])
@asynchronous
async def test_what_cannot_be_followed_is_refused_by_its_field(kind: str) -> None:
    async with house() as h:
        h.source.group.problems["bad"] = "line 3: no such rule"
        with pytest.raises(InvalidRequest) as caught:
            await h.engine.prepare(Constraint(kind=kind, text="bad"))  # type: ignore[arg-type]
        assert (caught.value.field, caught.value.problem) == (f"constraint.{kind}", "line 3: no such rule")
        await h.engine.prepare(GOOD)
        assert h.source.group.prepared[-1] == GOOD
        refused = h.engine.statistics().requests.refused
        assert (refused["InvalidRequest"], refused["Unavailable"]) == (1, 0)


@asynchronous
async def test_a_constraint_is_prepared_while_a_step_is_in_flight() -> None:
    async with house(gated=True) as h:
        h.engine.submit(request(1))
        await settle_down()
        assert h.source.group.is_waiting
        await asyncio.wait_for(h.engine.prepare(GOOD), 5)
        assert h.source.group.is_waiting


@asynchronous
async def test_a_rank_that_cannot_say_is_no_fault_of_the_constraint_and_the_group_goes_on() -> None:
    async with house() as h:
        h.source.group.prepare_errors["slow"] = WorkerError("rank 0 compiles others")
        with pytest.raises(Unavailable, match="rank 0 compiles others"):
            await h.engine.prepare(Constraint(kind="lark", text="slow"))
        h.engine.submit(request(1))
        await h.sink.wait_for_end(1)
        assert h.sink.end_of(1) == LENGTH
        assert len(h.source.groups) == 1


@asynchronous
async def test_without_ranks_or_while_nothing_is_taken_in_nothing_is_prepared() -> None:
    engine = Engine(SettingsInForce(SETTINGS), FakeSource(), RecordingSink())
    with pytest.raises(Unavailable, match="starting"):
        await engine.prepare(GOOD)
    async with house() as h:
        h.source.hold_restarts = True
        h.source.group.lose(WorkerLost("rank 1 has ended"))
        # Before the loop has noticed, the link says so itself.
        with pytest.raises(Unavailable, match="rank 1 has ended"):
            await h.engine.prepare(GOOD)
        await settle_down()
        with pytest.raises(Unavailable, match=r"recovering \(.*rank 1 has ended"):
            await h.engine.prepare(GOOD)
        h.source.release_restarts.set()
        await settle_down()
        await h.engine.prepare(GOOD)
        h.engine.drain()
        with pytest.raises(Unavailable, match="draining"):
            await h.engine.prepare(GOOD)
        assert h.engine.statistics().requests.refused["Unavailable"] == 3
