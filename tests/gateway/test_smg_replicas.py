"""Two replicas behind one smg: what it makes of a drain, a stop and a lost rank while requests keep coming."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import openai
import pytest
from flow.house import House, open_house
from gateway.smg_gateway import Smg, open_smg

PROMPT = "def add(a, b):\n    return"
NUM_CALLERS = 8
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Site:
    houses: tuple[House, House]
    smg: Smg

    @property
    def addresses(self) -> list[str]:
        return [house.deployment.address for house in self.houses]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_house() as one, open_house() as other:
        addresses = [house.deployment.address for house in (one, other)]
        with open_smg(addresses, tmp_path_factory.mktemp("smg")) as smg:
            yield Site((one, other), smg)


@dataclass(frozen=True, slots=True)
class Answer:
    """error: empty where the request came to its end."""

    streamed: bool
    text: str
    error: str = ""


class Callers:
    """Each asks again as soon as it has its answer; every second one reads a stream."""

    def __init__(self, smg: Smg, max_tokens: int) -> None:
        self._client = smg.client()
        self._max_tokens = max_tokens
        self._changed = threading.Condition()
        self._is_over = False
        self.answers: list[Answer] = []
        # Streams that have begun and not ended.
        self.num_streaming = 0

    def until(self, num_more: int) -> None:
        """Waits for so many more answers."""
        with self._changed:
            wanted = len(self.answers) + num_more
            assert self._changed.wait_for(lambda: len(self.answers) >= wanted, PATIENCE_S)

    def until_streaming(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_streaming >= count, PATIENCE_S)

    def call(self, number: int) -> None:
        while not self._is_over:
            answer = self._read_stream() if number % 2 else self._ask()
            with self._changed:
                self.answers.append(answer)
                self._changed.notify_all()

    def end(self) -> None:
        self._is_over = True

    def _ask(self) -> Answer:
        try:
            done = self._client.completions.create(
                model="demo", prompt=PROMPT, max_tokens=self._max_tokens, temperature=0
            )
        except openai.APIError as error:
            return Answer(streamed=False, text="", error=str(error))
        return Answer(streamed=False, text=done.choices[0].text)

    def _read_stream(self) -> Answer:
        text, reason = "", None
        try:
            for part in self._client.completions.create(
                model="demo", prompt=PROMPT, max_tokens=self._max_tokens, temperature=0, stream=True
            ):
                if not text:
                    self._count_stream(1)
                text += part.choices[0].text
                reason = part.choices[0].finish_reason
        except openai.APIError as error:
            return Answer(streamed=True, text=text, error=str(error))
        finally:
            if text:
                self._count_stream(-1)
        return Answer(streamed=True, text=text, error="" if reason else "it broke off")

    def _count_stream(self, change: int) -> None:
        with self._changed:
            self.num_streaming += change
            self._changed.notify_all()


@contextmanager
def calling(site: Site, max_tokens: int = 12) -> Iterator[Callers]:
    """Callers at work; on leaving each has had its last answer."""
    callers = Callers(site.smg, max_tokens)
    threads = [threading.Thread(target=callers.call, args=(number,)) for number in range(NUM_CALLERS)]
    for thread in threads:
        thread.start()
    try:
        yield callers
    finally:
        callers.end()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)


def submitted(house: House) -> int:
    return house.deployment.statistics().requests.submitted


def test_both_are_asked_in_turn(site: Site) -> None:
    with calling(site) as callers:
        callers.until(2 * NUM_CALLERS)
    assert [answer.error for answer in callers.answers if answer.error] == []
    assert all(submitted(house) > 0 for house in site.houses)


def test_a_drain_under_load_fails_no_request_and_a_resume_brings_it_back(site: Site) -> None:
    drained = site.houses[0]
    assert drained.client is not None
    with calling(site) as callers:
        callers.until(NUM_CALLERS)
        drained.run(drained.client.drain())
        # Until the gateway's next look it is still asked, says UNAVAILABLE, and the gateway asks the other one.
        callers.until(NUM_CALLERS)
        site.smg.until_healthy(site.addresses[1:])
        drained.run(drained.idle())
        before = submitted(drained)
        callers.until(NUM_CALLERS)
        assert submitted(drained) == before
        drained.run(drained.client.resume())
        site.smg.until_healthy(site.addresses)
        callers.until(2 * NUM_CALLERS)
        assert submitted(drained) > before
    assert [answer.error for answer in callers.answers if answer.error] == []
    assert {answer.streamed for answer in callers.answers} == {False, True}


def test_with_nobody_left_the_answer_is_503(site: Site) -> None:
    clients = [house.client for house in site.houses if house.client is not None]
    for house, client in zip(site.houses, clients, strict=True):
        house.run(client.drain())
    try:
        with pytest.raises(openai.APIStatusError) as caught:
            site.smg.client().completions.create(model="demo", prompt=PROMPT, max_tokens=4)
        assert caught.value.status_code == 503
    finally:
        for house, client in zip(site.houses, clients, strict=True):
            house.run(client.resume())
        site.smg.until_healthy(site.addresses)


def test_a_lost_rank_ends_streams_that_had_begun_and_costs_nobody_else_an_answer(site: Site) -> None:
    struck = site.houses[0]
    with calling(site, max_tokens=96) as callers:
        callers.until_streaming(NUM_CALLERS // 2)
        os.kill(struck.deployment.supervisor.launched[0].pid, signal.SIGKILL)
        callers.until(NUM_CALLERS)
    failed = [answer for answer in callers.answers if answer.error]
    # A part of the answer was out: to begin anew would repeat it.
    assert failed
    assert all(answer.streamed and answer.text and "a worker was lost" in answer.error for answer in failed)
    assert len(failed) <= NUM_CALLERS // 2
    site.smg.until_healthy(site.addresses)
    for house in site.houses:
        house.check_baseline()


def test_a_stop_under_load_fails_no_request(site: Site) -> None:
    """The last one: this replica does not come back."""
    stopped = site.houses[0]
    with calling(site, max_tokens=24) as callers:
        callers.until(NUM_CALLERS)
        stopping = stopped.begin(stopped.deployment.stop(30))
        stopping.result(PATIENCE_S)
        site.smg.until_healthy(site.addresses[1:])
        callers.until(NUM_CALLERS)
    assert [answer.error for answer in callers.answers if answer.error] == []
