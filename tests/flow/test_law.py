"""Unseeded sampling under speculation follows the target's own law: a G-test over real gRPC.

One prompt, temperature 1, top_k 8; the law of the first five tokens is enumerated with transformers. Requests have six
tokens and more drafts than that, so tokens 2 to 5 are accepted drafts, replacements and bonus tokens alike. Nothing
drafted or nothing rejected counts as failure. A rejection at 1e-6 gets one re-run, ten times as long, at 1e-9.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest

import pytest
import torch
from fakes.planners import USABLE, FormulaCosts
from flow.gtest import holm_rejects, table_p_values
from flow.house import House, request
from oracles import tiny
from oracles.days import on_turn

from configs.load import demo_checkpoint
from outrider.v1 import operator_pb2
from runtime.verification.policy_planner import NO_PROFILE

PROMPT = "class "
TOP_K, DEPTH, TOKENS, GAMMA = 8, 5, 6, 3


@pytest.fixture(scope="module")
def law(house: House) -> dict[tuple[int, ...], float]:
    """P(first DEPTH tokens) at temperature 1, top_k TOP_K, exactly."""
    lm, _ = tiny.reference(demo_checkpoint())
    prompt = house.run(house.deployment.tokenizer.encode(PROMPT))
    streams: list[tuple[int, ...]] = [()]
    probability_S = torch.ones(1)
    ids_SN, cache = torch.tensor([prompt]), None
    for _ in range(DEPTH):
        if cache is not None:  # each stream goes on from the state of the one it extends
            cache.reorder_cache(torch.arange(len(streams) // TOP_K).repeat_interleave(TOP_K))
        with torch.no_grad():
            out = lm(input_ids=ids_SN, cache=cache, use_cache=True, logits_to_keep=1)
        top_SK, token_SK = out.logits[:, -1].topk(TOP_K, -1)
        probability_S = (probability_S[:, None] * top_SK.softmax(-1)).flatten()
        streams = [
            (*stream, token) for stream, tokens in zip(streams, token_SK.tolist(), strict=True) for token in tokens
        ]
        ids_SN, cache = token_SK.reshape(-1, 1), out.cache
    assert abs(float(probability_S.sum()) - 1) < 1e-5
    return dict(zip(streams, probability_S.tolist(), strict=True))


@contextmanager
def fixed(house: House) -> Iterator[None]:
    house.set_policy(GAMMA)
    yield


@contextmanager
def dynamic(house: House) -> Iterator[None]:
    """The dynamic policy on a profile full of cliffs; fails where it had nothing to decide."""
    assert house.client is not None
    planner = house.planner
    costs = FormulaCosts(gamma_max=8, base=15.0, per_row=0.05, per_draft=0.2, cliffs=tuple(range(20, 300, 20)))

    async def use_profile(costs: FormulaCosts | None) -> None:
        planner.use_profile(costs, NO_PROFILE if costs is None else USABLE)

    def steps_by_gamma() -> list[int]:
        return list(planner.view().steps_by_gamma)

    policy = operator_pb2.VerificationPolicy()
    policy.dynamic.min_gain = 0.0
    house.run(use_profile(costs))
    before = steps_by_gamma()
    try:
        house.run(house.client.switch_policy(policy))
        yield
        steps = [now - then for now, then in zip_longest(steps_by_gamma(), before, fillvalue=0)]
        assert sum(count > 5 for count in steps) > 1, f"inconclusive: the draft length never varied, {steps}"
    finally:
        house.set_policy(GAMMA)
        house.run(use_profile(None))


POLICIES = {"fixed": fixed, "dynamic": dynamic}


def sample(house: House, count: int, policy: str) -> list[list[int]]:
    with POLICIES[policy](house):
        return sample_under(house, count, leaves_out=policy == "dynamic")


def sample_under(house: House, count: int, *, leaves_out: bool) -> list[list[int]]:
    requests = [request(PROMPT, TOKENS, temperature=1.0, top_k=TOP_K, ignore_eos=True) for _ in range(count)]
    replies = house.run(house.generate_all(requests, 32), timeout_s=3000)
    drafted = sum(r.usage.drafted for r in replies)
    accepted = sum(r.usage.accepted for r in replies)
    assert drafted > 0, "inconclusive: nothing was drafted"
    admitted = sum(r.usage.admitted for r in replies)
    assert (0.1 * drafted < admitted < 0.98 * drafted) == leaves_out, f"inconclusive: {admitted} of {drafted} admitted"
    assert 0.05 * drafted < accepted < 0.95 * drafted, "inconclusive: nothing was rejected, or nothing accepted"
    return [r.ids for r in replies]


def check(house: House, law: dict[tuple[int, ...], float], count: int, policy: str = "fixed") -> None:
    p_values = table_p_values(sample(house, count, policy), law, 1, DEPTH - 1)
    if rejected := holm_rejects(p_values, 1e-6):
        again = table_p_values(sample(house, 10 * count, policy), law, 1, DEPTH - 1)
        assert not holm_rejects(again, 1e-9), f"first run rejected {rejected}: {p_values}; second run: {again}"


@on_turn(1, of=2)
@pytest.mark.timeout(3600)  # a re-run takes ten times as long
def test_tokens_follow_the_targets_law(house: House, law: dict[tuple[int, ...], float]) -> None:
    check(house, law, 1500)


@on_turn(0, of=7)
@pytest.mark.timeout(3600)
def test_tokens_follow_the_targets_law_under_the_dynamic_policy(
    house: House, law: dict[tuple[int, ...], float]
) -> None:
    check(house, law, 1200, "dynamic")


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_follow_the_targets_law_20000(house: House, law: dict[tuple[int, ...], float], policy: str) -> None:
    check(house, law, 20_000, policy)


@on_turn(1, of=2)
def test_the_g_test_sees_a_biased_sampler(law: dict[tuple[int, ...], float]) -> None:
    """A sampler whose second token is the commonest a tenth of the time is rejected; the right one is not."""
    rng = random.Random(0)
    streams, weights = list(law), list(law.values())
    right = rng.choices(streams, weights, k=20_000)
    assert not holm_rejects(table_p_values(right, law, 1, DEPTH - 1), 1e-6)
    common = Counter(stream[1] for stream in right).most_common(1)[0][0]
    biased = [(s[0], common, *s[2:]) if rng.random() < 0.1 else s for s in right]
    assert holm_rejects(table_p_values(biased, law, 1, DEPTH - 1), 1e-6)
