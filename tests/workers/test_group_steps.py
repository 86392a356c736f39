"""Steps of a group: streams are those of one rank, bit for bit, whatever each rank is busy with; ranks agree."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator

import pytest
from oracles import tiny
from oracles.days import SEED, by_day
from oracles.group import GroupOfWorkers
from oracles.group_driver import GroupDriver

from parallel.mesh import ONE_RANK, Mesh

TWO_RANKS = {"tp2": Mesh(tp=2), "tp2_ep2": Mesh(tp=2, ep=2), "dp2_ep2": Mesh(dp=2, ep=2), "dp2": Mesh(dp=2)}
FOUR_RANKS = Mesh(tp=2, dp=2, ep=4)
FIELDS: dict[str, dict[str, object]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8, "top_p": 0.9},
    "standard": {"temperature": 1.0, "coupled": False},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A tiny model whose drafter is right about as often as not."""
    path = tmp_path_factory.mktemp("group") / "base"
    tiny.write(path, "base", agree=0.7)
    return path


@pytest.fixture(scope="module")
def load(checkpoint: object) -> Iterator[Callable[[Mesh, str], GroupOfWorkers]]:
    groups: list[GroupOfWorkers] = []

    @functools.cache
    def load(mesh: Mesh, numerics: str) -> GroupOfWorkers:
        group = GroupOfWorkers.load(
            mesh,
            checkpoint,
            numerics=numerics,
            page_size=4,
            max_model_len=96,
            hidden_window=5,  # type: ignore[arg-type]
        )
        groups.append(group)
        return group

    yield load
    for group in groups:
        group.close()


def add_sequences(driver: GroupDriver, count: int, **fields: object) -> None:
    """Sequence i is the same on every layout; ranks take turns."""
    rng = random.Random(3)
    for i in range(count):
        prompt = [rng.randrange(1, 250) for _ in range(rng.choice((1, 3, 17, 30)))]
        part = driver.drivers[i % len(driver.drivers)]
        part.add(prompt, 14 + i, **{"seed": 70 + i, **fields})  # type: ignore[arg-type]


def finish(driver: GroupDriver) -> list[list[int]]:
    """The streams, in order of entry; the group is empty and whole afterwards."""
    lives = [driver.drivers[i % len(driver.drivers)].live[i // len(driver.drivers)] for i in range(len(driver.live))]
    for part in driver.drivers:
        for live in list(part.live):
            part.remove(live)
    driver.step([[]] * len(driver.drivers))
    for worker in driver.group.workers:
        assert worker.check_integrity() == []
    return [live.out for live in lives]


def streams(group: GroupOfWorkers, gamma: int, count: int = 4, **fields: object) -> list[list[int]]:
    driver = GroupDriver(group, seed=gamma)
    add_sequences(driver, count, **fields)
    driver.run(gamma)
    return finish(driver)


_plain: dict[tuple[str, int], list[list[int]]] = {}


def plain(load: Callable[[Mesh, str], GroupOfWorkers], kind: str, count: int) -> list[list[int]]:
    """Streams of one rank without drafts."""
    if (kind, count) not in _plain:
        _plain[kind, count] = streams(load(ONE_RANK, "reference"), 0, count, **FIELDS[kind])
    return _plain[kind, count]


LAYOUTS = {**TWO_RANKS, "tp2_dp2_ep4": FOUR_RANKS}
GAMMAS, KINDS = (0, 3), ("greedy", "coupled")


def _case(i: int, name: str, gamma: int, kind: str) -> object:
    """Two runs on days in a row have each layout once; drafts and kinds of sequences take turns."""
    is_sampled = (gamma, kind) == (GAMMAS[i % 2], KINDS[i // 2 % 2]) and (i + i // 2) % 2 == SEED % 2
    marks = () if is_sampled else pytest.mark.full
    return pytest.param(LAYOUTS[name], gamma, kind, id=f"{name}-{gamma}-{kind}", marks=marks)


CASES = [_case(i, name, gamma, kind) for i, name in enumerate(LAYOUTS) for gamma in GAMMAS for kind in KINDS]


@pytest.mark.parametrize(("mesh", "gamma", "kind"), CASES)
def test_no_layout_and_no_draft_changes_a_token(
    load: Callable[[Mesh, str], GroupOfWorkers], mesh: Mesh, gamma: int, kind: str
) -> None:
    assert streams(load(mesh, "reference"), gamma, **FIELDS[kind]) == plain(load, kind, 4)


@pytest.mark.parametrize("mesh", by_day({name: mesh for name, mesh in LAYOUTS.items() if mesh.spreads_experts}))
def test_busy_prefilling_and_idle_ranks_keep_step(load: Callable[[Mesh, str], GroupOfWorkers], mesh: Mesh) -> None:
    """Members, chunks, γ, budgets and pauses at random, per rank: collectives match in every step, streams stand."""
    expected = plain(load, "coupled", 5)
    driver = GroupDriver(load(mesh, "reference"), seed=1)
    add_sequences(driver, 5, **FIELDS["coupled"])
    rng = random.Random(8)
    joined = set()
    while any(part.unfinished for part in driver.drivers):
        members = [rng.sample(part.unfinished, rng.randint(0, len(part.unfinished))) for part in driver.drivers]
        gamma = rng.choice((0, 1, 2, 4))
        driver.step(
            members,
            gamma=gamma,
            feed=gamma > 0 or rng.random() < 0.3,
            chunks={live.slot: rng.randint(1, 20) for part in members for live in part},
            budgets=[rng.choice((0, 1, 3, 10**6)) for _ in members],
            slack=rng.randint(0, 3),
        )
        joined |= {tally.group for report in driver.group.reports for tally in report.collectives if tally.count}
    assert finish(driver) == expected
    groups = {f"tp.{i}" for i in range(mesh.dp) if mesh.tp > 1} | ({"world"} if mesh.ep > 1 else set())
    assert joined == groups


@pytest.mark.parametrize("fields", by_day(FIELDS))
def test_default_numerics_differ_by_rounding_alone(
    load: Callable[[Mesh, str], GroupOfWorkers], fields: dict[str, object]
) -> None:
    """A tiny model has no near ties in so few tokens: all layouts say the same."""
    fields = {**fields, "coupled": True}
    expected = streams(load(ONE_RANK, "default"), 0, **fields)
    for mesh in LAYOUTS.values():
        assert streams(load(mesh, "default"), 2, **fields) == expected


def test_standard_drafts_stand_and_fall_on_every_layout(load: Callable[[Mesh, str], GroupOfWorkers]) -> None:
    """The noise of standard rounds is named by step: the same steps draw the same tokens on one rank and on two."""
    for mesh in (TWO_RANKS["tp2"], TWO_RANKS["tp2_ep2"]):
        outs = []
        for each in (ONE_RANK, mesh):
            driver = GroupDriver(load(each, "reference"), seed=2)
            driver.step_id = max(driver.step_id, 10_000)
            add_sequences(driver, 4, **FIELDS["standard"])
            driver.run(3)
            rounds = [result for live in driver.live for result in live.results]
            assert any(accepted < admitted for admitted, accepted in rounds)
            assert any(accepted for _, accepted in rounds)
            outs.append(finish(driver))
            driver.group.workers[0]._last_step = 9_000
            for worker in driver.group.workers:
                worker._last_step = 9_000
        assert outs[0] == outs[1]


def test_margins_come_from_all_columns(load: Callable[[Mesh, str], GroupOfWorkers]) -> None:
    found = []
    for mesh in (ONE_RANK, TWO_RANKS["tp2"]):
        driver = GroupDriver(load(mesh, "reference"))
        add_sequences(driver, 3)
        margins = []
        while any(not live.finished for live in driver.live):
            margins.append(driver.step(gamma=2, margins=True).batches[0].margins)
        finish(driver)
        found.append(margins)
    assert found[0] == found[1]
