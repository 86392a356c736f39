"""Log-probabilities of a group of ranks: one rank's, bit for bit; idle and busy ranks join the same collectives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from oracles import tiny
from oracles.days import by_day
from oracles.group import GroupOfWorkers
from oracles.group_driver import GroupDriver

from parallel.mesh import ONE_RANK, Mesh
from workers.demands import TokenLogprob

PROMPTS = [[(17 * i + 5 * j) % 250 + 1 for j in range(length)] for i, length in enumerate((3, 75, 1, 20))]
DEMANDS: list[dict[str, Any]] = [
    {"num_logprobs": 2, "num_prompt_logprobs": 1},
    {"num_logprobs": 0, "num_prompt_logprobs": 3, "temperature": 0.8, "seed": 1},
    {},
    {"num_prompt_logprobs": 0},
]
MESHES = {"tp2": Mesh(tp=2), "tp2_ep2": Mesh(tp=2, ep=2), "dp2_ep2": Mesh(dp=2, ep=2)}

Told = dict[int, tuple[list[TokenLogprob], list[TokenLogprob]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logprobs") / "base"
    tiny.write(path, "base", agree=0.7)
    return path


def told_by(checkpoint: Path, mesh: Mesh, gamma: int) -> Told:
    """By sequence, of its output and its prompt. Ranks take turns at being idle; a group of several dp ranks has the
    sequences on one of them."""
    group = GroupOfWorkers.load(mesh, checkpoint, numerics="reference", page_size=4, max_model_len=96)
    driver, rng = GroupDriver(group, seed=gamma), random.Random(gamma)
    first = driver.drivers[0]
    number = {
        first.add(prompt, 9, **demands).epoch: i
        for i, (prompt, demands) in enumerate(zip(PROMPTS, DEMANDS, strict=True))
    }
    others = [part.add([5, 6, 7], 30) for part in driver.drivers[1:]]
    found: Told = {i: ([], []) for i in range(len(PROMPTS))}
    while first.unfinished:
        members = [first.unfinished, *[[live] if rng.random() < 0.5 and not live.finished else [] for live in others]]
        chunks = {live.slot: rng.randint(1, 80) for live in first.unfinished}
        batch = driver.step(members, gamma=gamma, chunks=chunks).batches[0]
        for column, live in enumerate(members[0]):
            output, prompt = found[number[live.epoch]]
            output += batch.logprobs[column] if batch.logprobs else ()
            prompt += batch.prompt_logprobs[column] if batch.prompt_logprobs else ()
    group.close()
    return found


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Told:
    return told_by(checkpoint, ONE_RANK, 0)


@pytest.mark.parametrize("mesh", by_day(MESHES))
def test_they_are_those_of_one_rank(checkpoint: Path, alone: Told, mesh: Mesh) -> None:
    """The group checks after every step that its ranks joined the same collectives."""
    assert told_by(checkpoint, mesh, 3) == alone
    assert [(len(output), len(prompt)) for output, prompt in alone.values()] == [(9, 2), (9, 74), (0, 0), (0, 19)]
