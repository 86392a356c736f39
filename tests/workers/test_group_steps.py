"""Steps of a group: streams are those of one rank, bit for bit, whatever each rank is busy with; ranks agree."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from oracles import tiny
from oracles.days import SEED, by_day, on_turn
from oracles.group import GroupOfWorkers
from oracles.group_driver import GroupDriver
from torch import Tensor

from parallel.mesh import ONE_RANK, Mesh
from workers.draft.confidence import Measure
from workers.plan import IDENTITY, NUM_TEMPERATURE_CLASSES, Calibration

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
    """Three runs on days in a row have each layout once; drafts and kinds of sequences take turns."""
    is_sampled = (gamma, kind) == (GAMMAS[i % 2], KINDS[i // 2 % 2]) and i % 3 == SEED % 3
    marks = () if is_sampled else pytest.mark.full
    return pytest.param(LAYOUTS[name], gamma, kind, id=f"{name}-{gamma}-{kind}", marks=marks)


CASES = [_case(i, name, gamma, kind) for i, name in enumerate(LAYOUTS) for gamma in GAMMAS for kind in KINDS]


@pytest.mark.parametrize(("mesh", "gamma", "kind"), CASES)
def test_no_layout_and_no_draft_changes_a_token(
    load: Callable[[Mesh, str], GroupOfWorkers], mesh: Mesh, gamma: int, kind: str
) -> None:
    assert streams(load(mesh, "reference"), gamma, **FIELDS[kind]) == plain(load, kind, 4)


@on_turn(1, of=2)
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
            forced=rng.choice((0, 0, 1)),
            floor=rng.choice((0.0, 0.3)),
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


CELLS = NUM_TEMPERATURE_CLASSES * 8
CALIBRATION = Calibration(version=5, slopes=(0.7,) * CELLS, offsets=tuple(i / CELLS for i in range(CELLS)))


def peers_hold_the_same(group: GroupOfWorkers) -> Tensor:
    """Scores and confidences of all slots, after a look that the ranks which share them hold them bit for bit."""
    held = [torch.stack([w.rank.pools.score, w.rank.pools.confidence]).view(torch.int32) for w in group.workers]
    for rank, bits in enumerate(held):
        assert torch.equal(bits, held[group.mesh.tp_ranks(rank)[0]]), f"rank {rank} differs from its leader"
    return held[0]


@pytest.mark.parametrize("kind", FIELDS)
def test_ranks_that_share_sequences_hold_the_same_scores_bit_for_bit(
    load: Callable[[Mesh, str], GroupOfWorkers], kind: str
) -> None:
    """The driver holds the leader's admissions against `admit`, the digests the other rank's against the leader's."""
    driver = GroupDriver(load(TWO_RANKS["tp2"], "default"), seed=4)
    add_sequences(driver, 3, **FIELDS[kind])
    seen, partly = set(), False
    for step in range(8):
        result = driver.step(gamma=3, budgets=[4], floor=0.2, calibration=CALIBRATION if step % 2 else IDENTITY)
        seen |= set(peers_hold_the_same(driver.group).flatten().tolist())
        partly |= 0 < sum(result.batches[0].num_admitted) < sum(map(len, result.batches[0].drafted))
        assert all(len(report.digests) == len(result.batches[0].emitted) for report in driver.group.reports)
    assert len(seen) > 20
    assert partly, "inconclusive: all drafts were admitted, or none"
    finish(driver)


def test_ranks_that_admit_differently_are_found(load: Callable[[Mesh, str], GroupOfWorkers]) -> None:
    """By one draft that falls anyhow, so that both hold the same tokens after the step."""
    driver = GroupDriver(load(TWO_RANKS["tp2"], "default"), seed=5)
    add_sequences(driver, 1)
    (live,) = driver.live
    while not live.waiting:
        driver.step(gamma=1)
    for worker in driver.group.workers:
        log, at = worker.rank.pools.token_log[live.slot], len(live.prompt) + len(live.out)
        log[at] = (log[at] + 1) % 100
    driver.group.workers[1].rank.pools.confidence[live.slot] = 0.0
    driver.group.workers[0].rank.pools.confidence[live.slot] = 0.5
    with pytest.raises(AssertionError, match=r"ranks .* hold different tokens"):
        driver.step(gamma=1, floor=0.25)
    leader, follower = driver.group.reports
    assert leader.batch is not None
    assert (leader.batch.num_admitted, leader.batch.num_accepted) == ((1,), (0,))
    committed = [int(worker.rank.pools.committed_len[live.slot]) for worker in driver.group.workers]
    assert committed[0] == committed[1]
    assert leader.digests != follower.digests


def scores_of_first_drafts(path: Path, mesh: Mesh, confidence: str) -> list[list[float]]:
    group = GroupOfWorkers.load(mesh, path, max_model_len=96, confidence=confidence)
    driver = GroupDriver(group)
    add_sequences(driver, 3)
    driver.step(gamma=3)
    scores = driver.step(gamma=3).batches[0].scores
    peers_hold_the_same(group)
    group.close()
    return [list(row) for row in scores]


@pytest.mark.parametrize("measure", get_args(Measure))
def test_two_ranks_score_as_one_does(checkpoint: Path, tmp_path: Path, measure: str) -> None:
    shutil.copytree(checkpoint, tmp_path / "head")
    tiny.add_confidence_head(tmp_path / "head")
    alone, pair = (scores_of_first_drafts(tmp_path / "head", mesh, measure) for mesh in (ONE_RANK, TWO_RANKS["tp2"]))
    assert [len(row) for row in alone] == [3, 3, 3]
    for one, two in zip(alone, pair, strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-3)


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
