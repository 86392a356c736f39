"""An operator switches the policy every 50 ms while streams run: no stream fails or changes, and all figures add up."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from fakes.planners import USABLE, FormulaCosts
from flow.house import House, Reply, heldout, open_house, request
from oracles.days import SEED, by_day
from oracles.metric_laws import Scrape, check_laws, check_rise, parse

from outrider.v1 import inference_pb2, operator_pb2, types_pb2
from runtime.bench.comparison import PolicyRun, first_difference
from runtime.bench.completion import Completion, rounds_of

STREAMS = 32
TOKENS = 24
PERIOD_S = 0.05
POLICIES: tuple[dict[str, Any], ...] = (
    {"off": {}},
    *({"fixed": {"gamma": gamma}} for gamma in (0, 1, 2, 4, 8)),
    {"dynamic": {}},
    {"dynamic": {"gamma_min": 1, "gamma_max": 3}},
    {"dynamic": {"itl_limit_ms": 40.0, "min_survival": 0.3}},
)
PRIORITIES = (None, None, 1)
"""Whose policy a switch is: mostly everybody's, sometimes that of every fourth request."""
LAYOUTS = {"tp2": {"parallel__tp": 2}, "dp2_ep2": {"parallel__dp": 2, "parallel__ep": 2}}


def requests(count: int, *, report_rounds: bool = False) -> list[inference_pb2.GenerateRequest]:
    """Greedy and seeded ones in turn; every third ends where a line does, in the middle of a run or not."""
    found = [
        request(
            prompt,
            TOKENS,
            ignore_eos=True,
            **({"temperature": 1.0, "seed": SEED + i} if i % 2 else {}),
            **({"stop": ["\n"]} if i % 3 == 2 else {}),
        )
        for i, prompt in enumerate(heldout(count, SEED % 200))
    ]
    for i, each in enumerate(found):
        each.report_rounds = report_rounds
        if i % 4 == 3:
            each.priority = 1
        if i % 8 == 0:
            each.max_drafts = 2
    return found


@dataclass(slots=True)
class Seen:
    """What a time of switching brought. replies: by request, as often as it came round. before, after: counters."""

    replies: list[list[Reply]]
    before: operator_pb2.Counters
    after: operator_pb2.Counters
    states: list[operator_pb2.VerificationPolicyState] = field(default_factory=list)
    scrapes: list[Scrape] = field(default_factory=list)


def switch_for(house: House, asked: list[inference_pb2.GenerateRequest], seconds: float) -> Seen:
    """32 streams without a pause, and beside them the operator: switches, looks, lists, checks, scrapes."""
    client = house.client
    assert client is not None
    counters = house.run(client.get_status()).counters
    seen = Seen([[] for _ in asked], counters, counters)
    ends_s = time.monotonic() + seconds
    turns = itertools.cycle(range(len(asked)))
    chance = random.Random(SEED)

    async def stream() -> None:
        while time.monotonic() < ends_s:
            turn = next(turns)
            seen.replies[turn].append(await house.generate(asked[turn]))

    async def switch() -> None:
        state = await client.get_policy()
        while time.monotonic() < ends_s:
            # Costs with cliffs, so that lengths and budgets jump; anew each time, before they are found out as wrong.
            cliffs = tuple(chance.sample(range(2, 150), 6))
            house.planner.use_profile(
                FormulaCosts(gamma_max=8, cliffs=cliffs, per_row=chance.choice((0.1, 2.0))), USABLE
            )
            state = await client.switch_policy(
                operator_pb2.VerificationPolicy(**chance.choice(POLICIES)),
                expected_revision=state.revision,
                priority=chance.choice(PRIORITIES),
            )
            seen.states.append(state)
            await asyncio.sleep(PERIOD_S)

    async def look() -> None:
        while time.monotonic() < ends_s:
            status = await client.get_status()
            assert status.state == operator_pb2.SERVER_STATE_SERVING
            listed = await client.list_requests()
            assert len(listed.requests) == listed.total <= STREAMS
            assert list((await client.check_integrity()).violations) == []
            if house.deployment.metrics_address is not None:
                seen.scrapes.append(parse(await asyncio.to_thread(_scrape, house.deployment.metrics_address)))
            await asyncio.sleep(PERIOD_S)

    async def all_of_it() -> None:
        async with asyncio.TaskGroup() as group:
            for work in (switch(), look(), *(stream() for _ in range(STREAMS))):
                group.create_task(work)

    house.run(all_of_it(), timeout_s=seconds + 120)
    seen.after = house.run(client.get_status()).counters
    return seen


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return str(answer.read(), "utf-8")


def check(house: House, seen: Seen, seconds: float) -> None:
    """Revisions rise by one, each in force from a step on; policies came into effect; counts and pools add up."""
    assert [after.revision - before.revision for before, after in itertools.pairwise(seen.states)] == [1] * (
        len(seen.states) - 1
    )
    steps = [state.effective_step for state in seen.states]
    assert steps == sorted(steps)
    assert len(seen.states) > seconds / PERIOD_S / 4, "the server was too slow to be switched"
    assert sum(map(len, seen.replies)) >= STREAMS
    usages = [reply.usage for replies in seen.replies for reply in replies]
    assert all(usage.completion_tokens == usage.accepted + usage.rounds - usage.trimmed for usage in usages)
    assert 0 < sum(usage.accepted for usage in usages) < sum(usage.admitted for usage in usages)
    assert sum(usage.admitted for usage in usages) < sum(usage.drafted for usage in usages), (
        "no budget was ever partial"
    )
    assert {state.policy.WhichOneof("policy") for state in seen.states} == {"off", "fixed", "dynamic"}
    # What the server counted is what its clients were told, stop strings or not.
    for name, of_usage in {"emitted": "completion_tokens", "trimmed": "trimmed", "rounds": "rounds"}.items():
        total = getattr(seen.after, name) - getattr(seen.before, name)
        assert total == sum(getattr(usage, of_usage) for usage in usages), name
    for name in ("drafted", "admitted", "accepted"):
        after, before = (sum(getattr(counters, f"{name}_by_position")) for counters in (seen.after, seen.before))
        assert after - before == sum(getattr(usage, name) for usage in usages), name
    assert seen.after.finished - seen.before.finished == len(usages)
    assert any(reply.reason == types_pb2.FINISH_REASON_STOP_STRING for replies in seen.replies for reply in replies)
    for scrape in seen.scrapes:
        check_laws(scrape)
    for before, after in itertools.pairwise(seen.scrapes):
        check_rise(before, after)
    house.check_baseline()


def check_exact(house: House, seconds: float) -> None:
    asked = requests(STREAMS)
    house.set_policy(None)
    plain = house.run(house.generate_all(asked, STREAMS))
    seen = switch_for(house, asked, seconds)
    for turn, replies in enumerate(seen.replies):
        assert [(reply.ids, reply.text) for reply in replies] == [(plain[turn].ids, plain[turn].text)] * len(replies)
    check(house, seen, seconds)


def test_switching_under_load_changes_no_stream(reference_house: House) -> None:
    check_exact(reference_house, 5)


@pytest.mark.full
def test_switching_for_a_minute_changes_no_stream(reference_house: House) -> None:
    check_exact(reference_house, 60)


@pytest.mark.full
@pytest.mark.parametrize("layout", by_day(LAYOUTS, count=0))
def test_all_ranks_switch_together(layout: dict[str, int]) -> None:
    with open_house(model__numerics="reference", **layout) as house:
        check_exact(house, 60)


@pytest.mark.full
def test_in_default_numerics_streams_part_at_ties_only(house: House) -> None:
    asked = requests(STREAMS, report_rounds=True)
    house.set_policy(None)
    plain = [_completion(reply) for reply in house.run(house.generate_all(asked, STREAMS))]
    seen = switch_for(house, asked, 60)
    for turn, replies in enumerate(seen.replies):
        for reply in replies:
            difference = first_difference(_run(plain[turn]), _run(_completion(reply)))
            assert difference is None or turn % 2 or difference.is_tie("float32"), difference
    check(house, seen, 60)


def _completion(reply: Reply) -> Completion:
    rounds = tuple(round_ for frame in reply.frames for round_ in rounds_of(frame))
    return Completion(tokens=tuple(reply.ids), rounds=rounds, num_passes=reply.usage.rounds, sent_s=0.0, frames=())


def _run(completion: Completion) -> PolicyRun:
    return PolicyRun(policy="", completions=(completion,))


def test_of_two_operators_at_once_one_wins_and_no_stream_changes(reference_house: House) -> None:
    house = reference_house
    client = house.client
    assert client is not None
    asked = requests(4)
    house.set_policy(None)
    plain = house.run(house.generate_all(asked, 4))

    async def contend(gamma: int) -> bool:
        state = await client.get_policy()
        try:
            await client.set_policy(gamma, expected_revision=state.revision)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.ABORTED:
                raise
            return False
        return True

    async def both() -> tuple[list[Reply], list[list[bool]]]:
        streams = asyncio.create_task(house.generate_all(asked, 4))
        wins = []
        while not streams.done():
            wins.append(list(await asyncio.gather(contend(3), contend(1))))
        return await streams, wins

    revision = house.run(client.get_policy()).revision
    replies, wins = house.run(both())
    assert [reply.ids for reply in replies] == [reply.ids for reply in plain]
    assert all(any(pair) for pair in wins), "of two that ask at once one is first"
    assert house.run(client.get_policy()).revision == revision + sum(map(sum, wins))
    house.check_baseline()
