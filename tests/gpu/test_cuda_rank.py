"""A rank on a GPU gives the tokens of a rank on a CPU. Needs a GPU; deploy/gpu_check.sh runs it."""

from __future__ import annotations

import random

import pytest
from oracles.driver import Driver
from oracles.ranks import load_worker

PROMPTS = [random.Random(i).choices(range(1, 4096), k=n) for i, n in enumerate((1, 17, 40, 70))]


def greedy(device: str, gamma: int) -> list[list[int]]:
    worker = load_worker(device=device, max_running=8)
    driver = Driver(worker)
    live = [driver.add(prompt, 32) for prompt in PROMPTS]
    while any(not sequence.finished for sequence in live):
        driver.step(gamma=gamma, chunks={sequence.slot: 23 for sequence in live})
    assert worker.check_integrity() == []
    return [sequence.out for sequence in live]


@pytest.mark.gpu
@pytest.mark.parametrize("gamma", [0, 4])
def test_greedy_streams_are_those_of_a_cpu(gamma: int) -> None:
    assert greedy("cuda", gamma) == greedy("cpu", 0)


def test_the_check_itself_runs_on_a_cpu() -> None:
    assert greedy("cpu", 4) == greedy("cpu", 0)
