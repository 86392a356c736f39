"""A rank's typical verification: which drafts stand, by the laws of plain passes; greedy and exact neighbours."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from oracles import tiny_law
from oracles.driver import Driver, Live
from oracles.tiny_law import CUTS, PROMPT, next_laws

from workers.demands import Typical
from workers.step import Worker

TYPICAL = Typical(epsilon=0.2, delta=0.5)


@functools.cache
def worker() -> Worker:
    return tiny_law.worker(12)


def bars(laws_WV: torch.Tensor) -> torch.Tensor:
    """By the formula, of float64 laws."""
    entropy_W = -torch.special.xlogy(laws_WV, laws_WV).sum(-1)
    return torch.minimum(torch.tensor(TYPICAL.epsilon), TYPICAL.delta * (-entropy_W).exp())


@pytest.mark.parametrize("company", [False, True], ids=["alone", "in company"])
def test_drafts_stand_by_the_targets_law_as_sampled(company: bool) -> None:
    """As cut by top-k, top-p and min-p: without the cuts there is more entropy and less probability."""
    driver, rng = Driver(worker(), seed=1), random.Random(2)
    ours = [
        driver.add(PROMPT, 16, temperature=1.0, seed=rng.getrandbits(64), typical=TYPICAL, **CUTS) for _ in range(6)
    ]
    if company:
        driver.add([4, 5], 16)
        driver.add([6], 16, temperature=1.0, coupled=False, seed=3)
        driver.add([7, 7], 16, temperature=1.0, seed=4)
    outcomes = {True: 0, False: 0}
    while any(not live.finished for live in ours):
        members = driver.unfinished
        before = {live.slot: tuple(live.out) for live in members}
        result = driver.step(members, gamma=3, budget=rng.choice((4, 100)))
        for column, live in enumerate(members):
            reached = min(result.num_accepted[column] + 1, result.num_admitted[column])
            if live not in ours or not reached:
                continue
            drafts = result.drafted[column]
            prefixes = [(*before[live.slot], *drafts[:j]) for j in range(reached)]
            laws_WV = next_laws(worker(), prefixes, **CUTS).double()
            for j, (law_V, bar) in enumerate(zip(laws_WV, bars(laws_WV), strict=True)):
                stood = j < result.num_accepted[column]
                if abs(float(law_V[drafts[j]] - bar)) > 1e-4:
                    assert stood == bool(law_V[drafts[j]] > bar)
                outcomes[stood] += 1
    assert min(outcomes.values()) > 5, outcomes


def streams(gamma: int, **fields: object) -> list[list[int]]:
    driver = Driver(worker(), seed=3)
    lives: list[Live] = [driver.add([3 + i, 9], 14, seed=50 + i, **fields) for i in range(4)]  # type: ignore[arg-type]
    driver.run(gamma)
    return [live.out for live in lives]


def test_greedy_streams_are_exact() -> None:
    assert streams(3, typical=TYPICAL) == streams(0)


def test_its_neighbours_streams_are_exact() -> None:
    driver = Driver(worker(), seed=4)
    lives = [driver.add([3 + i, 9], 14, seed=50 + i, temperature=0.9) for i in range(4)]
    for i in range(4):
        driver.add([30 + i], 14, seed=i, temperature=1.0, typical=TYPICAL)
    driver.run(3)
    assert [live.out for live in lives] == streams(0, temperature=0.9)


def test_it_comes_before_coupling_and_its_drafts_are_drawn_with_noise_of_their_own() -> None:
    """So two runs from other steps differ, whatever `coupled` says."""
    outs = []
    for coupled in (False, True):
        driver = Driver(worker(), seed=5)
        driver.step_id = 5000
        live = driver.add(PROMPT, 20, temperature=1.0, seed=8, typical=TYPICAL, coupled=coupled)
        driver.run(2)
        modes = worker().rank.registers.modes([live.slot])
        assert (modes.any_lossy, modes.any_coupled, modes.any_standard) == (True, False, False)
        assert modes.draws_drafts
        outs.append(live.out)
        worker()._last_step = 4000
    assert outs[0] == outs[1]


def test_its_drafts_are_drawn_where_nobody_else_draws_any() -> None:
    """Not taken for those of greedy rows: behind one token requests draft several."""
    driver = Driver(worker(), seed=6)
    lives = [driver.add(PROMPT, 4, temperature=1.0, seed=seed, typical=TYPICAL) for seed in range(1, 13)]
    driver.step(gamma=1)
    drafts: dict[int, set[int]] = {}
    for live in lives:
        cell = len(PROMPT) + 1
        drafts.setdefault(live.out[0], set()).add(int(worker().rank.pools.token_log[live.slot, cell]))
    assert max(map(len, drafts.values())) > 1
