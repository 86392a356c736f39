"""Steps that take too long: seen while they run, by few looks, and over when they are."""

from __future__ import annotations

import asyncio

import pytest
from fakes.engine_house import SETTINGS, House, asynchronous, house, settle_down
from fakes.requests import request
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import ServerSettings
from runtime.front.errors import Unavailable
from runtime.stall import PERIOD_S, StallWatch
from runtime.status import ServerState
from workers.plan import StepTimeout


class Bench:
    """A watch and a clock. late: what was told of it, with the time."""

    def __init__(self, limit_s: float) -> None:
        self.now_s = 0.0
        self.limit_s = limit_s
        self.told: list[tuple[float, bool]] = []
        self.num_looks = 0
        self.watch = StallWatch(
            lambda: self.limit_s, lambda late: self.told.append((self.now_s, late)), lambda: self.now_s
        )
        self._next_s = 0.0

    def pass_time(self, seconds: float) -> None:
        """Looks whenever a look is due."""
        until_s = self.now_s + seconds
        while self._next_s <= until_s:
            self.now_s = max(self.now_s, self._next_s)
            self.num_looks += 1
            self._next_s = self.now_s + self.watch.look()
        self.now_s = until_s


@given(
    st.sampled_from((0.25, 0.75, 1.0, 3.5)),
    st.lists(st.tuples(st.sampled_from((0.0, 0.125, 0.5, 2.0, 7.5)), st.sampled_from((0.0, 0.125, 1.0, 5.0)))),
)
def test_every_late_step_is_told_at_its_moment_and_no_other(limit_s: float, steps: list[tuple[float, float]]) -> None:
    bench = Bench(limit_s)
    expected: list[tuple[float, bool]] = []
    for step_s, idle_s in steps:
        bench.watch.begin()
        # Not of one that ends at the very moment: whether it is late then, nobody can tell.
        step_s += 1 / 64
        if step_s > limit_s:
            expected += [(bench.now_s + limit_s, True), (bench.now_s + step_s, False)]
        bench.pass_time(step_s)
        bench.watch.end()
        bench.pass_time(idle_s)
    assert bench.told == expected


def test_looks_are_as_many_whatever_the_number_of_steps() -> None:
    bench = Bench(limit_s=15.0)
    for _ in range(10_000):
        bench.watch.begin()
        bench.pass_time(0.001)
        bench.watch.end()
    assert bench.num_looks <= 10 / PERIOD_S + 1
    assert bench.told == []


def test_a_limit_that_is_lowered_counts_within_a_period() -> None:
    bench = Bench(limit_s=1000.0)
    bench.watch.begin()
    bench.pass_time(20.5)
    bench.limit_s = 5.0
    bench.pass_time(PERIOD_S)
    assert [late for _, late in bench.told] == [True]


async def until(h: House, is_serving: bool) -> None:
    changed = asyncio.Event()
    h.engine.add_state_listener(lambda _: changed.set())
    async with asyncio.timeout(10):
        while h.engine.is_serving is not is_serving:
            changed.clear()
            await changed.wait()


QUICK = SETTINGS.model_copy(update={"server": ServerSettings(stall_s=0.01)})


@asynchronous
async def test_health_follows_a_step_that_stalls_and_its_end_while_requests_are_taken() -> None:
    async with house(gated=True, settings=QUICK) as h:
        h.engine.submit(request(1))
        await settle_down()
        h.now_s += 1.0
        await until(h, False)
        assert h.engine.status().state is ServerState.STALLED
        h.engine.submit(request(2))
        await h.step()
        assert h.engine.is_serving
        assert h.states == [True, False, True]


@asynchronous
async def test_a_stall_that_ends_with_the_ranks_is_not_told_as_a_moment_of_health() -> None:
    async with house(gated=True, settings=QUICK) as h:
        h.engine.submit(request(1))
        await settle_down()
        h.now_s += 1.0
        await until(h, False)
        h.source.hold_restarts = True
        h.source.group.fail_step(StepTimeout("rank 0: 30 s"))
        await settle_down()
        assert h.engine.status().state is ServerState.RECOVERING
        with pytest.raises(Unavailable, match="recovering"):
            h.engine.submit(request(2))
        assert h.states == [True, False], "from the stall to the loss without a word between"
        h.source.release_restarts.set()
        await until(h, True)
        assert h.states == [True, False, True]
