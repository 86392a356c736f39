"""Metrics of a live server while clients, operators and ranks do what they like: every scrape keeps to the rules of
form and to the laws of counting, and at the end says what clients have seen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest
import yaml
from flow.house import House, open_house, request
from oracles.exposition import problems_of
from oracles.metric_laws import Scrape, check_laws, check_rise, parse
from oracles.metric_names import TARGET
from oracles.promql_value import Recorded
from prometheus_client.parser import text_string_to_metric_families

from outrider.v1 import inference_pb2
from runtime.front import errors
from runtime.front.refusals import Refusals

SERVICE = "outrider.v1.InferenceService"
SCRAPED_EVERY_S = 1.0
"""What the recorded scrapes are said to be apart, whatever they were."""
PAUSE_S = 0.1
"""Between scrapes: reading and checking one takes some 30 ms of the loop that serves, too."""
GAMMA_MAX = 4
BY_POSITION = ("outrider_gamma_steps_total", "outrider_draft_survival", "outrider_calibration_error")
LABELS_OF_TARGET = dict(zip(TARGET, ("outrider", "here"), strict=True))
OBSERVABILITY = Path(__file__).parents[2] / "deploy" / "observability"


@dataclass
class Scraper:
    """Scrapes and checks until it is told to stop; the first that breaks a rule ends it."""

    url: str
    scrapes: list[Scrape] = field(default_factory=list)
    history: Recorded = field(default_factory=Recorded)
    is_done: bool = False

    async def run(self) -> None:
        while not self.is_done:
            await self.scrape()
            await asyncio.sleep(PAUSE_S)

    async def scrape(self) -> Scrape:
        text = await asyncio.to_thread(self._get)
        assert problems_of(text) == []
        found = parse(text)
        check_laws(found)
        if self.scrapes:
            check_rise(self.scrapes[-1], found)
        time_s = SCRAPED_EVERY_S * len(self.scrapes)
        self.history.add("up", LABELS_OF_TARGET, time_s, 1.0)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.history.add(sample.name, {**LABELS_OF_TARGET, **sample.labels}, time_s, sample.value)
        self.scrapes.append(found)
        return found

    def _get(self) -> str:
        with urllib.request.urlopen(self.url, timeout=20) as answer:
            return str(answer.read(), "utf-8")


@dataclass
class Seen:
    """What clients were told: the codes of their errors, and of calls that they cancelled, how many."""

    errors: Counter[str] = field(default_factory=Counter)
    cancelled: int = 0


def bad_request(chance: random.Random) -> inference_pb2.GenerateRequest:
    """One that the front refuses."""
    match chance.randrange(6):
        case 0:
            return request("x", 4, temperature=-1.0)
        case 1:
            return inference_pb2.GenerateRequest()
        case 2:
            return inference_pb2.GenerateRequest(model=f"model {chance.random()}", text="x")
        case 3:
            return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[2**31 - 1]))
        case 4:
            return inference_pb2.GenerateRequest(text="x" * (5 << 20))
        case _:
            return inference_pb2.GenerateRequest(text="x", request_id="y" * 2000)


def any_request(chance: random.Random) -> inference_pb2.GenerateRequest:
    if chance.random() < 0.2:
        return bad_request(chance)
    message = request(
        chance.choice(["def f(", "import ", "x" * 200]),
        chance.randint(1, 40),
        temperature=chance.choice([0.0, 1.0]),
        stop=["e"] if chance.random() < 0.2 else [],
        ignore_eos=chance.random() < 0.5,
    )
    message.priority = chance.choice([0, 0, -1, 5, chance.randint(-(2**31), 2**31 - 1)])
    message.n = chance.randint(1, 3)
    if chance.random() < 0.1:
        message.request_id = "the same"
    if chance.random() < 0.1:
        message.stopping.time_limit_ms = 10
    return message


async def client_life(house: House, chance: random.Random, num_calls: int, seen: Seen) -> None:
    assert house.client is not None
    for _ in range(num_calls):
        call = house.client.call(any_request(chance))
        leaves_after = chance.randint(1, 4) if chance.random() < 0.2 else None
        try:
            num_frames = 0
            async for _ in call:
                num_frames += 1
                if num_frames == leaves_after:
                    call.cancel()
        except asyncio.CancelledError:
            seen.cancelled += 1
        except grpc.aio.AioRpcError as error:
            seen.errors[error.code().name] += 1
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                await house.client.wait_ready(SERVICE, 60)


async def operator_life(house: House, chance: random.Random, stop: asyncio.Event, seen: Seen) -> None:
    client = house.client
    assert client is not None
    while not stop.is_set():
        try:
            match chance.randrange(5):
                case 0 | 1:
                    await client.set_policy(chance.choice([None, 0, 1, GAMMA_MAX]))
                case 2:
                    await client.set_policy(GAMMA_MAX + 1)
                case 3:
                    await client.abort(["the same", "nobody"])
                case _:
                    await client.drain()
                    await client.get_status()
                    await client.resume()
        except grpc.aio.AioRpcError as error:
            seen.errors[error.code().name] += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.1)


async def lose_a_rank(house: House, scraper: Scraper) -> None:
    """Kills one while something runs, and returns when requests are taken again."""
    assert house.client is not None
    before = scraper.scrapes[-1]["outrider_rank_losses_total"][()]
    while not house.deployment.statistics().running:
        await asyncio.sleep(0.002)
    os.kill(house.deployment.supervisor.launched[0].pid, signal.SIGKILL)
    while scraper.scrapes[-1]["outrider_rank_losses_total"][()] == before:
        await asyncio.sleep(0.02)
    await house.client.wait_ready(SERVICE, 60)


async def chaos(house: House, seed: int, *, num_clients: int, num_calls: int, num_losses: int) -> tuple[Scraper, Seen]:
    chance, seen, stop = random.Random(seed), Seen(), asyncio.Event()
    scraper = Scraper(f"http://{house.deployment.metrics_address}/metrics")
    await scraper.scrape()
    # Whatever fails, a rule that a scrape breaks first of all, ends the others.
    async with asyncio.TaskGroup() as group:
        group.create_task(scraper.run())
        operating = group.create_task(operator_life(house, chance, stop, seen))
        async with asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(client_life(house, random.Random(chance.random()), num_calls, seen))
            for _ in range(num_losses):
                await lose_a_rank(house, scraper)
        stop.set()
        await operating
        await house.idle()
        scraper.is_done = True
    await scraper.scrape()
    return scraper, seen


@pytest.fixture(scope="module")
def stormy_house() -> Iterator[House]:
    settings = {"speculation__gamma_max": GAMMA_MAX, "speculation__gamma": 3, "scheduler__max_waiting": 4}
    with open_house(metrics__port=0, cache__max_running=8, **settings) as house:
        yield house


@pytest.mark.parametrize(
    ("seed", "num_clients", "num_calls", "num_losses"),
    [(26, 8, 5, 1), *(pytest.param(seed, 12, 60, 3, marks=pytest.mark.full) for seed in (2, 3, 4))],
)
def test_laws_hold_in_every_scrape_of_a_storm(
    stormy_house: House, seed: int, num_clients: int, num_calls: int, num_losses: int
) -> None:
    house = stormy_house
    work = chaos(house, seed, num_clients=num_clients, num_calls=num_calls, num_losses=num_losses)
    first_errors = Counter(house.deployment.look().front.errors)
    scraper, seen = house.run(work)
    assert len(scraper.scrapes) > 20
    house.check_baseline()
    first, last = scraper.scrapes[0], scraper.scrapes[-1]

    def rise(name: str) -> float:
        return sum(last[name].values()) - sum(first[name].values())

    check_errors(Counter(house.deployment.look().front.errors) - first_errors, seen)
    assert rise("outrider_rank_losses_total") == rise("outrider_restarts_total") == num_losses
    assert rise("outrider_outage_seconds_total") > 0
    assert rise("outrider_step_duration_seconds_count") == rise("outrider_steps_total") > 0
    assert rise("outrider_engine_overhead_seconds_count") == rise("outrider_steps_total")
    assert sum(last["outrider_open_calls"].values()) == sum(last["outrider_open_streams"].values()) == 0
    assert sum(last["outrider_waiting_requests"].values()) == 0
    check_labels(first, last)
    check_what_is_drawn(scraper.history, SCRAPED_EVERY_S * (len(scraper.scrapes) - 1))


def check_errors(counted: Counter[str], seen: Seen) -> None:
    """By code: what the server has counted is what clients were told, and what some had left before they could be."""
    assert set(counted) <= set(Refusals().view())
    by_code: Counter[str] = Counter()
    for name, count in counted.items():
        by_code[getattr(errors, name).code] += count
    assert by_code.keys() >= {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAVAILABLE"}
    for code in by_code.keys() | seen.errors.keys():
        assert seen.errors[code] <= by_code[code] <= seen.errors[code] + seen.cancelled, (code, by_code, seen)
    assert counted["MessageTooLong"] > 0
    assert counted["InternalError"] == 0


def check_labels(first: Scrape, last: Scrape) -> None:
    """No sample has come that clients could bring about at will: new are draft lengths, positions and policies."""
    for name, samples in last.items():
        for labels in samples.keys() - first.get(name, {}).keys():
            if name == "outrider_policy_info":
                assert set(labels) <= {"", "off", "fixed"}
                continue
            (value,) = labels
            assert name in BY_POSITION
            assert 0 <= int(value) <= GAMMA_MAX


def check_what_is_drawn(history: Recorded, end_s: float) -> None:
    """Each query of the dashboard has something to show, and the loss of ranks raises its alert and no other of its
    kind."""
    board = json.loads((OBSERVABILITY / "dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    for query in queries:
        if "certificate" in query:  # there is none
            continue
        for name in ("job", "instance", "model"):
            query = query.replace(f"${name}", ".*")
        drawn = [history.at(query, time_s) for time_s in (end_s / 2, end_s)]
        assert any(drawn), query
    rules = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text())["groups"]
    raised = {rule["alert"] for group in rules for rule in group["rules"] if history.at(rule["expr"], end_s)}
    assert "OutriderRanksLost" in raised
    assert not raised & {"OutriderDown", "OutriderAbsent", "OutriderInternalErrors", "OutriderNotServing"}
