"""Under the dynamic policy a rank's unseeded streams follow the target's law, one by one and in pairs of one batch.

Scheduler, planner and rank as they serve, on costs full of cliffs; temperature 1, all cuts, in the company of greedy
and coupled requests. Tokens 2 to γ + 1 come out of verified drafts, which `Tally` holds the run to. Seeds are fixed; a
rejection at 1e-6 gets one re-run with other seeds, ten times as long, at 1e-9.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from admission.hosts import planner
from admission.served import Served
from fakes.planners import FormulaCosts
from flow.gtest import holm_rejects, pair_p_values, table_p_values
from oracles.days import by_day
from oracles.tiny_law import CUTS, PROMPT, VOCAB_SIZE, Stream, exact_law, worker

from runtime.request import Request, SamplingParams, StopParams
from runtime.verification.policy import Dynamic
from workers.sampling.randomness import Purpose, audit_keys

SLOTS, DEPTH, LENGTH, GAMMA_MAX = 24, 5, 11, 4
"""Streams are longer than what is compared of them: near an end little is drafted and nothing left out. Enough
sequences for a quick run; worlds of two, in which one moves a budget most, are enumerated."""

CASES: dict[str, dict[str, Any]] = {
    "throughput": {
        "policy": Dynamic(min_gain=0.0, gamma_max=GAMMA_MAX),
        "cliffs": (14, 25, 38, 51, 66),
        "cliff_ms": 0.7,
    },
    "floor": {
        "policy": Dynamic(min_gain=0.0, gamma_max=GAMMA_MAX, min_survival=0.3),
        "cliffs": (25, 45, 65),
        "cliff_ms": 1.0,
    },
    "forced": {
        "policy": Dynamic(min_gain=0.0, gamma_max=GAMMA_MAX, gamma_min=1),
        "cliffs": (40, 52, 64, 76, 88),
        "cliff_ms": 0.4,
    },
}


@functools.cache
def law() -> dict[Stream, float]:
    return exact_law(worker(SLOTS), DEPTH)


def sampled(uid: int, seed: int) -> Request:
    return Request(
        uid=uid,
        request_id=str(uid),
        prompt=PROMPT,
        sampling=SamplingParams(temperature=1.0, seed=seed, **CUTS),
        stopping=StopParams(max_tokens=LENGTH),
    )


def company(uid: int, rng: random.Random) -> Request:
    return Request(
        uid=uid,
        request_id=str(uid),
        prompt=tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 4))),
        sampling=SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=rng.getrandbits(64), coupled=True),
        stopping=StopParams(max_tokens=LENGTH),
    )


def sample(num_pairs: int, *, policy: Dynamic, cliffs: Sequence[int], cliff_ms: float, seed: int) -> list[list[Stream]]:
    """Pairs of streams that began in one step. Fails where nothing could be told by them."""
    rank = worker(SLOTS)
    costs = FormulaCosts(
        gamma_max=rank.description.gamma_max,
        base=2.0,
        per_row=0.02,
        per_draft=0.05,
        cliffs=tuple(cliffs),
        cliff_ms=cliff_ms,
    )
    served, rng = Served(rank, planner(costs, policy, explore_every=16), costs, seed=seed), random.Random(seed)
    uid, pairs = 0, []
    while len(pairs) < num_pairs or served.scheduler.has_work:
        while len(pairs) < num_pairs and served.num_running + len(served.queue) <= SLOTS - 2:
            if rng.random() < 0.3:
                served.submit(company(uid := uid + 1, rng))
                continue
            for number in (uid + 1, uid + 2):
                served.submit(sampled(number, rng.getrandbits(64)))
            pairs.append((uid + 1, uid := uid + 2))
        served.step()
    tally = served.tally
    assert tally.drafted > tally.admitted > 0, "inconclusive: nothing was drafted or verified, or nothing left out"
    assert len(tally.gammas) > 1, "inconclusive: the draft length never varied"
    assert tally.partial > len(pairs) / 20, "inconclusive: hardly a budget left anything out"
    assert len(tally.lengths) > 1, "inconclusive: no length varied"
    for position in range(1, DEPTH - 1):
        speculated = (tally.stood[position], tally.fell[position])
        assert min(speculated) > len(pairs) / 50, (
            f"inconclusive: {speculated} drafts of position {position} stood, fell"
        )
    return [[served.streams[uid][:DEPTH] for uid in pair] for pair in pairs]


def p_values(pairs: Sequence[Sequence[Stream]]) -> dict[str, float]:
    found = table_p_values([stream for pair in pairs for stream in pair], law(), 1, DEPTH - 1)
    return found | pair_p_values(pairs, law(), 1, DEPTH - 2)


def check(num_pairs: int, case: Mapping[str, Any]) -> None:
    first = p_values(sample(num_pairs, **case, seed=1))
    if rejected := holm_rejects(first, 1e-6):
        again = p_values(sample(10 * num_pairs, **case, seed=2))
        assert not holm_rejects(again, 1e-9), f"first run rejected {rejected}: {first}; second run: {again}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", by_day(CASES))
def test_streams_and_pairs_follow_the_targets_law(case: Mapping[str, Any]) -> None:
    check(400, case)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_streams_and_pairs_follow_the_targets_law_20000(case: Mapping[str, Any]) -> None:
    check(10_000, case)


def test_pairs_that_know_of_each_other_are_rejected() -> None:
    """Else the tables of pairs would prove nothing."""
    rng = random.Random(0)
    streams, weights = list(law()), list(law().values())
    right = [rng.choices(streams, weights, k=2) for _ in range(3000)]
    assert not holm_rejects(p_values(right), 1e-6)
    # One in eight pairs agrees on its second token; each stream of it still follows the law.
    alike = [[one, other if rng.random() > 1 / 8 else one] for one, other in right]
    assert holm_rejects(p_values(alike), 1e-6)


def test_no_key_is_used_twice_under_the_dynamic_policy() -> None:
    with audit_keys() as audit:
        sample(100, **CASES["throughput"], seed=3)
    audit.uses = [use for use in audit.uses if use.seed]  # rows of padding have seed 0
    assert audit.repeated() == []
    drafts = Counter((use.seed, use.position) for use in audit.uses if use.purpose is Purpose.DRAFT)
    assert max(drafts.values()) > 1, "inconclusive: no position was drafted twice"
