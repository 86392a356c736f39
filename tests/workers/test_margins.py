"""Margins that a step reports: those of the target's own logits at every emitted token, whatever was drafted."""

from __future__ import annotations

import random

import pytest
import torch
from oracles.driver import Driver, Live
from oracles.ranks import load_worker

from workers.probe import trace_sequences
from workers.step import Worker


def leads(worker: Worker, live: Live) -> list[float]:
    """Largest less second largest logit before each token of `live.out`, from a pass without drafts or sampling."""
    rank = worker.rank
    (trace,) = trace_sequences(rank.model, rank.ops, [live.prompt + live.out], lambda i: 5)
    top_T2 = trace.logits[len(live.prompt) - 1 : -1].float().topk(2).values
    return (top_T2[:, 0] - top_T2[:, 1]).tolist()


def run(driver: Driver, gamma: int) -> tuple[dict[int, list[float]], int]:
    """Runs to the end, prompts in chunks and some drafts left unverified. The margins by slot, and how many tokens
    were verified and then cut off."""
    rng = random.Random(3)
    num_cut = 0
    margins: dict[int, list[float]] = {live.slot: [] for live in driver.live}
    while members := [live for live in driver.live if not live.finished]:
        chunks = {live.slot: 4 for live in members}
        result = driver.step(members, gamma=gamma, chunks=chunks, budget=rng.choice((3, 7, 100)), margins=True)
        assert [len(run) for run in result.margins] == [len(run) for run in result.emitted]
        for live, some in zip(members, result.margins, strict=True):
            margins[live.slot] += some
        num_cut += sum(
            accepted + 1 - len(out) for accepted, out in zip(result.num_accepted, result.emitted, strict=True) if out
        )
    return margins, num_cut


@pytest.mark.parametrize(("numerics", "tolerance"), [("default", 1e-4), ("reference", 0.0)])
@pytest.mark.parametrize("gamma", [0, 4])
def test_margins_are_those_of_a_plain_pass_over_the_same_tokens(numerics: str, tolerance: float, gamma: int) -> None:
    worker = load_worker(numerics=numerics, max_running=3, max_model_len=64)
    driver = Driver(worker)
    driver.add([5, 6, 7, 8, 9, 10, 11], 18)
    driver.add([300], 13, temperature=0.7, seed=4)
    driver.add([40, 41, 42] * 4, 18, temperature=1.0, coupled=False, seed=9)
    everyone = list(driver.live)
    margins, num_cut = run(driver, gamma)
    for live in everyone:
        assert margins[live.slot] == pytest.approx(leads(worker, live), rel=0, abs=tolerance)
        assert all(margin == torch.tensor(margin).item() for margin in margins[live.slot]), "exact in float32"
    if gamma:
        assert any(accepted for live in everyone for _, accepted in live.results)
        assert num_cut > 0


def test_a_step_that_draws_nothing_has_no_margins_and_one_that_is_not_asked_has_no_column() -> None:
    driver = Driver(load_worker(max_running=2, max_model_len=64))
    live = driver.add([5, 6, 7, 8], 8)
    assert driver.step(chunks={live.slot: 2}, margins=True).margins == ((),)
    assert driver.step(chunks={live.slot: 2}).margins == ()
    assert driver.step(gamma=2).margins == ()
    assert len(driver.step(gamma=2, margins=True).margins[0]) > 0
