"""A rank's unseeded sampling follows the target's own law, whatever is drafted, admitted and scheduled.

One prompt under all cuts at once, in the company of greedy and coupled requests; members, draft lengths and budgets are
drawn at random for each step. The law of the first tokens is enumerated by plain passes. Seeds are fixed, so a run is
the same every time; nothing is stopped early, since streams that finish first are not a fair sample.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from flow.gtest import holm_rejects, table_p_values
from oracles import tiny_law
from oracles.days import by_day
from oracles.driver import Driver, Live
from oracles.tiny_law import CUTS, PROMPT, VOCAB_SIZE, Stream, exact_law, next_laws

from workers.plan import VERIFY_EVERYTHING
from workers.sampling.randomness import Purpose, audit_keys, exponential_noise
from workers.step import Worker

SLOTS, DEPTH = 48, 4
GAMMAS = (0, 1, 2, 3, 5)

BUDGETS = {"scarce": (2, 6, 12, 24), "ample": (3, 20, VERIFY_EVERYTHING)}


def worker() -> Worker:
    return tiny_law.worker(SLOTS)


@functools.cache
def law() -> dict[Stream, float]:
    return exact_law(worker(), DEPTH)


def sample(count: int, budgets: Sequence[int]) -> list[Stream]:
    """`count` streams of the request, all that were begun; a quarter of all requests are neighbours of another mode."""
    rng, driver = random.Random(1), Driver(worker(), seed=2)
    ours: list[Live] = []
    while len(ours) < count or driver.live:
        while driver.free_slots and len(ours) < count:
            seed = rng.getrandbits(64)
            if rng.random() < 0.25:
                prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 4))]
                driver.add(prompt, DEPTH, temperature=rng.choice((0.0, 1.0)), seed=seed)
            else:
                ours.append(driver.add(PROMPT, DEPTH, temperature=1.0, seed=seed, coupled=False, **CUTS))
        members = rng.sample(driver.live, rng.randint((len(driver.live) + 1) // 2, len(driver.live)))
        driver.step(
            members,
            gamma=rng.choice(GAMMAS),
            budget=rng.choice(budgets),
            forced=rng.choice((0, 0, 1)),
            floor=rng.choice((0.0, 0.0, 0.4)),
        )
        for live in members:
            if live.finished:
                driver.remove(live)
    verified = sum(drafts for live in ours for drafts, _ in live.results)
    accepted = sum(accepted for live in ours for _, accepted in live.results)
    assert 0.2 * verified < accepted < 0.9 * verified, "inconclusive: hardly a draft stood, or hardly one fell"
    return [tuple(live.out) for live in ours]


def check(count: int, budgets: Sequence[int]) -> None:
    p_values = table_p_values(sample(count, budgets), law(), 0, DEPTH - 1)
    assert not holm_rejects(p_values, 1e-6), p_values


@pytest.mark.parametrize("budgets", by_day(BUDGETS))
def test_tokens_follow_the_targets_law(budgets: Sequence[int]) -> None:
    check(2000, budgets)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("budgets", BUDGETS.values(), ids=BUDGETS)
def test_tokens_follow_the_targets_law_20000(budgets: Sequence[int]) -> None:
    check(20_000, budgets)


def test_no_key_is_used_twice() -> None:
    """Though output positions are drafted again after a draft before them fell."""
    with audit_keys() as audit:
        sample(150, BUDGETS["ample"])
    audit.uses = [use for use in audit.uses if use.seed]  # rows of padding have seed 0
    assert audit.repeated() == []
    without_step = Counter((use.seed, use.purpose, use.position) for use in audit.uses)
    assert {purpose for (_, purpose, _), count in without_step.items() if count > 1} > {Purpose.DRAFT, Purpose.ACCEPT}


def test_confidence_is_fixed_before_its_draft_is_drawn() -> None:
    """Requests that agree up to a draft have one score and one confidence in it, whichever token each then draws."""
    gamma = 2
    driver = Driver(worker(), seed=4)
    lives = [driver.add(PROMPT, 4, temperature=1.0, seed=seed, coupled=False, **CUTS) for seed in range(1, 1 + SLOTS)]
    driver.step(gamma=gamma)
    pools = worker().rank.pools
    drawn: dict[Stream, set[int]] = {}
    confidences: dict[Stream, list[tuple[float, float]]] = {}
    for live in lives:
        first = len(PROMPT)
        tokens = pools.token_log[live.slot, first : first + 1 + gamma].tolist()
        for j in range(gamma):
            before = tuple(tokens[: 1 + j])
            drawn.setdefault(before, set()).add(tokens[1 + j])
            sure = float(pools.score[live.slot, j]), float(pools.confidence[live.slot, j])
            confidences.setdefault(before, []).append(sure)
    for before, values in confidences.items():
        for value in values:
            assert value == pytest.approx(values[0], rel=1e-4, abs=1e-5), before
    assert {len(before) for before, tokens in drawn.items() if len(tokens) > 1} == {1, 2}, "inconclusive: no two differ"


@pytest.mark.parametrize("cut", CUTS)
def test_each_cut_works_alone(cut: str) -> None:
    """No other request is there whose cuts would switch on the code of this one."""
    driver = Driver(worker(), seed=3)
    lives = [driver.add(PROMPT, 1, temperature=1.0, seed=seed, **{cut: CUTS[cut]}) for seed in range(1, 1 + SLOTS)]
    driver.step()
    noise_BV = exponential_noise(torch.arange(1, 1 + SLOTS), torch.zeros(SLOTS, dtype=torch.int64), VOCAB_SIZE)
    cut_V, whole_V = next_laws(worker(), [()], **{cut: CUTS[cut]})[0], next_laws(worker(), [()])[0]
    assert [live.out for live in lives] == (cut_V / noise_BV).argmax(-1, keepdim=True).tolist()
    assert [live.out for live in lives] != (whole_V / noise_BV).argmax(-1, keepdim=True).tolist()
