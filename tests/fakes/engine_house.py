"""A started engine between fake ranks and a recording sink, and the balance of its books at the end."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

from fakes.front_sink import RecordingSink
from fakes.worker import FakeSource, describe

from configs.schema import SchedulerSettings, ServeSettings, SpeculationSettings
from runtime.engine import Engine
from runtime.in_force import SettingsInForce
from runtime.request import Finish, FinishReason

SETTINGS = ServeSettings(
    scheduler=SchedulerSettings(max_step_tokens=32, max_waiting=3),
    speculation=SpeculationSettings(gamma=3, gamma_max=4),
)
P = ParamSpec("P")

LENGTH = Finish(reason=FinishReason.LENGTH)


async def settle_down() -> None:
    """Lets everything run that waits for no step."""
    for _ in range(20):
        await asyncio.sleep(0)


async def no_pause(seconds: float) -> None:
    await asyncio.sleep(0)


class House:
    """An engine between fake ranks and a recording sink.

    pauses_s: the pauses between attempts to restart, which take no time. pause_error: what they raise, if anything.
    hold_pauses: they wait until `release_pauses` is set.
    now_s: the engine's clock.
    """

    def __init__(self, source: FakeSource, settings: ServeSettings) -> None:
        self.source = source
        self.sink = RecordingSink()
        self.now_s = 0.0
        self.engine = Engine(SettingsInForce(settings), source, self.sink, pause=self._pause, clock=lambda: self.now_s)
        self.pauses_s: list[float] = []
        self.hold_pauses = False
        self.release_pauses = asyncio.Event()
        self.pause_error: Exception | None = None
        self.states: list[bool] = []
        self.engine.add_state_listener(self.states.append)

    @property
    def num_pages_used(self) -> int:
        return sum(use.used for use in self.engine.statistics().pages)

    async def _pause(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        await no_pause(seconds)
        if self.hold_pauses:
            await self.release_pauses.wait()
        if self.pause_error is not None:
            raise self.pause_error

    async def step(self) -> None:
        """Lets the step in flight answer."""
        await settle_down()
        self.source.group.let_go()
        await settle_down()


@asynccontextmanager
async def house(
    *, dp: int = 1, gated: bool = False, settings: ServeSettings = SETTINGS, **changes: object
) -> AsyncIterator[House]:
    """A started house; on leaving, the books balance and no plan broke the contract."""
    built = House(FakeSource(describe(**changes), dp=dp, gated=gated), settings)
    await built.engine.start()
    try:
        yield built
        assert built.engine.check_books() == []
    finally:
        await built.engine.stop(drain_s=0)
    assert built.source.violations == []
    assert built.sink.violations == []
    assert built.num_pages_used == 0
    assert built.source.is_stopped


def asynchronous(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs a test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run
