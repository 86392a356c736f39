"""Over real gRPC, reference numerics: streams do not depend on speculation, company or a live switch.

Prompts and pairs move with a seed, the day's number unless OUTRIDER_TEST_SEED names another; test ids carry it.
"""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from flow.house import House, Reply, heldout, request
from oracles.days import SEED

MODES = {"greedy": {}, "seeded": {"temperature": 1.0}}
GAMMAS = (None, 1, 2, 4, 8)
CONCURRENCIES = (1, 16)

_baselines: dict[tuple[str, int, int], list[Reply]] = {}


def requests(mode: str, start: int, count: int, tokens: int) -> list:  # type: ignore[type-arg]
    prompts = [heldout(1, (start + i) % 256)[0] for i in range(count)]
    return [
        request(prompt, tokens, ignore_eos=True, seed=None if mode == "greedy" else 1000 + i, **MODES[mode])  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts)
    ]


def baseline(house: House, mode: str, start: int, count: int, tokens: int) -> list[Reply]:
    """Plain decoding at concurrency 16, once per mode."""
    key = (mode, start, count)
    if key not in _baselines:
        house.set_policy(None)
        _baselines[key] = house.run(house.generate_all(requests(mode, start, count, tokens), 16))
        assert all(len(reply.ids) == tokens for reply in _baselines[key])
        assert all(reply.usage.drafted == 0 for reply in _baselines[key])
    return _baselines[key]


def check(house: House, mode: str, gamma: int | None, concurrency: int, start: int, count: int, tokens: int) -> None:
    expected = baseline(house, mode, start, count, tokens)
    house.set_policy(gamma)
    replies = house.run(house.generate_all(requests(mode, start, count, tokens), concurrency), timeout_s=1800)
    for i, (reply, plain) in enumerate(zip(replies, expected, strict=True)):
        assert reply.ids == plain.ids, f"prompt {i}"
        assert reply.text == plain.text
    check_usage(replies, speculating=bool(gamma))
    house.check_baseline()


def check_usage(replies: list[Reply], *, speculating: bool) -> None:
    for reply in replies:
        usage = reply.usage
        assert usage.completion_tokens == len(reply.ids) == usage.accepted + usage.rounds - usage.trimmed
        assert usage.accepted <= usage.admitted <= usage.drafted
        assert [f.HasField("finish") for f in reply.frames] == [False] * (len(reply.frames) - 1) + [True]
    if speculating:
        assert sum(r.usage.accepted for r in replies) > 0
        assert sum(r.usage.accepted for r in replies) < sum(r.usage.drafted for r in replies)


# Every pair of (mode, gamma), (gamma, concurrency) and (mode, concurrency) within four seeds in a row.
PAIRWISE = [
    pytest.param(
        list(MODES)[(i + c + SEED) % 2],
        gamma,
        concurrency,
        marks=() if (i + c) % 2 == SEED // 2 % 2 else pytest.mark.full,
    )
    for i, gamma in enumerate(GAMMAS)
    for c, concurrency in enumerate(CONCURRENCIES)
]


@pytest.mark.parametrize("seed", [SEED], ids="seed{}".format)
@pytest.mark.parametrize(("mode", "gamma", "concurrency"), PAIRWISE)
def test_streams_are_those_of_plain_decoding(
    reference_house: House, mode: str, gamma: int | None, concurrency: int, seed: int
) -> None:
    count = 3 if concurrency == 1 else 16
    check(reference_house, mode, gamma, concurrency, start=seed * 16 % 256, count=count, tokens=24)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("mode", "gamma", "concurrency"), list(itertools.product(MODES, GAMMAS, CONCURRENCIES)))
def test_all_streams_are_those_of_plain_decoding(
    reference_house: House, mode: str, gamma: int | None, concurrency: int
) -> None:
    check(reference_house, mode, gamma, concurrency, start=0, count=64, tokens=96)


@pytest.mark.parametrize("seed", [SEED], ids="seed{}".format)
def test_a_live_switch_changes_nothing(reference_house: House, seed: int) -> None:
    """The policy changes all the time while sixteen streams run; each keeps its tokens."""
    house = reference_house
    expected = {mode: baseline(house, mode, seed * 16 % 256, 16, 24) for mode in MODES}

    async def switching(done: asyncio.Event) -> int:
        rng = random.Random(seed)
        switches = 0
        assert house.client is not None
        while not done.is_set():
            state = await house.client.set_policy(rng.choice(GAMMAS))
            assert state.effective_step > 0
            switches += 1
        return switches

    async def streams() -> tuple[list[Reply], int]:
        done = asyncio.Event()
        switcher = asyncio.create_task(switching(done))
        all_requests = [r for mode in MODES for r in requests(mode, seed * 16 % 256, 16, 24)]
        for one in all_requests:
            one.report_rounds = True
        replies = await house.generate_all(all_requests, 16)
        done.set()
        return replies, await switcher

    replies, switches = house.run(streams())
    assert switches > 20
    assert [r.ids for r in replies] == [r.ids for mode in MODES for r in expected[mode]]
    lengths = [{len(round_.drafted_token_ids) for round_ in r.rounds[1:]} for r in replies]
    assert any(0 in seen and len(seen) > 1 for seen in lengths), "no stream had rounds with and without drafts"
    house.check_baseline()
