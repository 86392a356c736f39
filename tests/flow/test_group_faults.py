"""Whatever befalls one rank of a group: streams end with UNAVAILABLE in time, all ranks are replaced, nothing is left.

Faults strike at random moments of real steps, inside collectives too; what comes back serves the same tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from fakes import saboteur
from fakes.relay import RelayedLauncher
from fakes.saboteur import Order
from fakes.supervised import is_gone
from flow.house import House, open_house, request
from oracles.days import SEED, by_day, on_turn

from configs.schema import ServeSettings
from runtime.cluster.process_launcher import ProcessLauncher

STEP_TIMEOUT_S = 4.0
NOTICED_S = 2.0
"""From a death or an exception to the status of every stream."""
STOPPED_S = STEP_TIMEOUT_S + NOTICED_S
"""The same for a rank that stands still in a step."""
BACK_S = 60.0

LAYOUTS = {
    "tp2": {"parallel__tp": 2},
    "tp2_ep2": {"parallel__tp": 2, "parallel__ep": 2},
    "dp2_ep2": {"parallel__dp": 2, "parallel__ep": 2},
}


@dataclass(slots=True)
class FaultyHouse:
    """A house whose ranks take orders. expected: tokens of a well one."""

    house: House
    orders: Path
    launcher: RelayedLauncher
    expected: list[int] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        return [launched.pid for launched in self.house.deployment.supervisor.launched]

    def sample(self) -> list[int]:
        return self.house.run(self.house.generate(request("def f(", 10, ignore_eos=True))).ids

    def strike(self, *orders: Order, bound_s: float) -> str:
        """Executes orders under load; returns what a stream was told. All that must hold afterwards is checked."""

        async def fault() -> float:
            saboteur.give(self.orders, *orders)
            while len(saboteur.pending(self.orders)) > len(orders) - 1:
                await asyncio.sleep(0.01)  # the file is all that another process tells
            return saboteur.struck_at(self.orders)

        return self.check(fault, bound_s=bound_s)

    def check(self, fault: Callable[[], Awaitable[float]], *, bound_s: float, num_streams: int = 4) -> str:
        """fault: makes one happen and returns when it did."""
        house, before = self.house, self.pids

        async def run() -> list[grpc.aio.AioRpcError]:
            flags = [asyncio.Event() for _ in range(num_streams)]
            streams = [asyncio.create_task(until_error(house, flag)) for flag in flags]
            await asyncio.gather(*(flag.wait() for flag in flags))
            struck = await fault()
            errors = list(await asyncio.gather(*streams))
            seconds = time.monotonic() - struck
            assert seconds < bound_s, f"streams learned {seconds:.1f} s after the fault"
            return errors

        errors = house.run(run())
        assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
        assert house.client is not None
        house.run(house.client.wait_ready("outrider.v1.InferenceService", BACK_S))
        assert saboteur.pending(self.orders) == []
        assert all(map(is_gone, before)), "a rank of the old group is still there"
        assert not set(before) & set(self.pids)
        assert self.sample() == self.expected
        house.check_baseline()
        return errors[0].details() or ""


async def until_error(house: House, started: asyncio.Event) -> grpc.aio.AioRpcError:
    """Streams until it fails; sets `started` at the first frame."""
    assert house.client is not None
    try:
        async for _ in house.client.generate(request("import sys\n", 480, ignore_eos=True)):
            started.set()
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the stream ended well")


@pytest.fixture(scope="module", params=by_day(LAYOUTS))
def faulty(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyHouse]:
    folder = tmp_path_factory.mktemp("faults")
    orders = folder / "orders.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(saboteur.ORDERS, str(orders))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        launchers: list[RelayedLauncher] = []

        def launcher_for(settings: ServeSettings) -> RelayedLauncher:
            launcher = RelayedLauncher(ProcessLauncher(settings.cluster, folder, factory=saboteur.FACTORY))
            launchers.append(launcher)
            return launcher

        with open_house(
            launcher=launcher_for,
            cluster__step_timeout_s=STEP_TIMEOUT_S,
            state_dir=folder,
            **request.param,
        ) as house:
            house.set_policy(2)
            faulty = FaultyHouse(house, orders, launchers[0])
            faulty.expected = faulty.sample()
            yield faulty


PLACES, FAULTS = ("step", "collective"), ("kill", "raise", "stop")


CASES = list(itertools.product((0, 1), PLACES, FAULTS))


@pytest.mark.parametrize(
    ("rank", "where", "how"),
    [pytest.param(*case, marks=() if (i + SEED) % 4 == 0 else pytest.mark.full) for i, case in enumerate(CASES)],
)
def test_a_rank_that_fails_takes_no_stream_with_it_in_silence(
    faulty: FaultyHouse, rank: int, where: str, how: str
) -> None:
    bound_s = STOPPED_S if how == "stop" else NOTICED_S
    told = faulty.strike(Order(rank=rank, where=where, how=how, after=5), bound_s=bound_s)
    assert f"rank {rank}" in told, told
    assert {"kill": "SIGKILL", "raise": saboteur.DEATH_CRY, "stop": "no result after"}[how] in told


@on_turn(1, of=2)
def test_a_rank_dies_while_the_group_comes_back(faulty: FaultyHouse) -> None:
    """Twice in a row: once in a step, once while loading; and a third time in the first step after."""
    faulty.strike(
        Order(rank=1, where="step", how="kill"),
        Order(rank=0, where="load", how="kill"),
        Order(rank=1, where="load", how="raise", after=1),
        bound_s=NOTICED_S,
    )
    faulty.strike(Order(rank=0, where="step", how="raise"), bound_s=NOTICED_S)


def test_an_idle_rank_that_dies_is_replaced(faulty: FaultyHouse) -> None:
    before = faulty.pids
    lost = faulty.house.begin(_not_serving(faulty.house))
    os.kill(before[1], signal.SIGKILL)
    lost.result(NOTICED_S)
    assert faulty.house.client is not None
    faulty.house.run(faulty.house.client.wait_ready("outrider.v1.InferenceService", BACK_S))
    assert all(map(is_gone, before))
    assert faulty.sample() == faulty.expected


@pytest.mark.parametrize(("rank", "how"), [(0, "cut"), (1, "clog")])
def test_a_link_that_breaks_or_falls_silent(faulty: FaultyHouse, rank: int, how: str) -> None:
    async def fault() -> float:
        relay = faulty.launcher.relays[rank]
        struck = time.monotonic()
        relay.cut() if how == "cut" else relay.clog()
        return struck

    told = faulty.check(fault, bound_s=NOTICED_S if how == "cut" else STOPPED_S)
    assert f"rank {rank}" in told, told


@pytest.mark.parametrize("how", ["tokens", "order"])
def test_ranks_that_disagree_are_caught_within_the_step(faulty: FaultyHouse, how: str) -> None:
    """A rank that logs another token than its leader, or joined another number of collectives, is named at once."""
    if how == "tokens" and faulty.house.deployment.mesh.tp == 1:
        pytest.skip("no rank shares its sequences with another")
    told = faulty.strike(Order(rank=1, where="step", how=how, after=3), bound_s=NOTICED_S)
    assert "RanksDisagree" in told
    assert "0" in told
    assert "1" in told


def chain(faulty: FaultyHouse, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        how = rng.choice(("kill", "kill", "raise", "stop"))
        order = Order(rank=rng.randrange(2), where=rng.choice(("step", "collective")), how=how, after=rng.randrange(60))
        faulty.strike(order, bound_s=STOPPED_S if how == "stop" else NOTICED_S)
    assert len(json.loads(faulty.orders.read_text())) == 0


@on_turn(1, of=4)
def test_three_faults_in_a_row(faulty: FaultyHouse) -> None:
    chain(faulty, 3, seed=5)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_twenty_faults_in_a_row(faulty: FaultyHouse) -> None:
    chain(faulty, 20, seed=6)


async def _not_serving(house: House) -> None:
    lost = asyncio.Event()
    house.deployment.engine.add_state_listener(lambda serving: None if serving else lost.set())
    if house.deployment.engine.is_serving:
        await lost.wait()
