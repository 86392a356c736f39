"""`outrider drain` and `outrider resume`: what is waited for, how long, and what ends the waiting."""

from __future__ import annotations

import asyncio

import pytest
from fakes.commands import outrider_in_loop
from fakes.front import in_loop, request_for, serving, status_of

from outrider.v1 import operator_pb2
from runtime.cli import console, drain
from runtime.cli.drain import INTERVAL_S, Waiting
from runtime.cli.replicas import Answer, Failure

DRAINING, SERVING = operator_pb2.SERVER_STATE_DRAINING, operator_pb2.SERVER_STATE_SERVING


@pytest.fixture
def outrider(monkeypatch):
    return outrider_in_loop(monkeypatch)


def status(running: int, waiting: int = 0, state: int = DRAINING) -> operator_pb2.GetStatusResponse:
    half = running // 2
    batches = [operator_pb2.BatchStatus(running=half), operator_pb2.BatchStatus(running=running - half)]
    return operator_pb2.GetStatusResponse(state=state, batches=batches, waiting=waiting)


class Script:
    """Stands for `Replicas`: per address the answers of one question after the other."""

    def __init__(self, **answers: list[operator_pb2.GetStatusResponse | Failure]) -> None:
        self.addresses = tuple(answers)
        self.asked: list[list[str]] = []
        self._answers = {address: iter(lines) for address, lines in answers.items()}

    async def ask(self, question, addresses):
        self.asked.append(list(addresses))
        given = [(address, next(self._answers[address])) for address in addresses]
        return [one if isinstance(one, Failure) else Answer(address=address, value=one) for address, one in given]


class Time:
    """Seconds that pass in sleep alone."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def follow(script: Script, wait_s: float | None = None) -> tuple[Waiting, Time]:
    time = Time()
    live = dict.fromkeys(script.addresses, "3 running, 0 waiting")
    waiting = Waiting(script, live, clock=time.clock, sleep=time.sleep)
    asyncio.run(waiting.until_idle(wait_s))
    return waiting, time


def test_each_change_is_printed_once_and_an_idle_server_is_asked_no_more(capsys):
    script = Script(a=[status(3), status(1), status(1), status(0)], b=[status(0)])
    waiting, time = follow(script)
    assert waiting.code == 0
    assert script.asked == [["a", "b"], ["a"], ["a"], ["a"]]
    assert capsys.readouterr().out == "b: nothing is live\na: 1 running, 0 waiting\na: nothing is live\n"
    assert time.slept == [INTERVAL_S] * 3


def test_waiting_requests_are_waited_for_too():
    script = Script(a=[status(0, waiting=2), status(0)])
    follow(script)
    assert len(script.asked) == 2


def test_the_wait_ends_when_it_was_told_to_with_code_1(capsys):
    script = Script(a=[status(2)] * 9, b=[status(3), status(0)])
    waiting, time = follow(script, wait_s=1.2)
    assert waiting.code == console.EXIT_NO
    assert time.slept == pytest.approx([0.5, 0.5, 0.2])
    assert capsys.readouterr().err == "error: a: requests are live after 1.2 s; the server drains on\n"


def test_a_server_that_goes_away_or_is_resumed_is_not_waited_for(capsys):
    gone = Failure(address="a", message="UNAVAILABLE: gone", code=console.EXIT_UNAVAILABLE)
    script = Script(a=[status(3), gone], b=[status(3, state=SERVING)], c=[status(3), status(3), status(0)])
    waiting, _ = follow(script)
    assert script.asked == [["a", "b", "c"], ["a", "c"], ["c"]]
    assert waiting.code == console.EXIT_NO
    assert capsys.readouterr().err == (
        "error: b: takes requests again: somebody resumed it\nerror: a: UNAVAILABLE: gone\n"
    )


@in_loop
async def test_drain_returns_when_the_last_stream_has_ended(outrider):
    async with serving(steps_by_itself=False) as front:
        call = front.client.call(request_for(max_tokens=6))
        await front.engine.until(lambda: len(front.engine.live) == 1)
        front.engine.step()
        drained = asyncio.create_task(outrider("drain", "--address", front.address))
        while front.engine.is_serving:
            await asyncio.sleep(0)
        code, details = await status_of(front.client.call(request_for()))
        assert not drained.done()
        front.engine.step()
        result = await drained
        assert sum([len(frame.token_ids) async for frame in call]) == 6
        again = await outrider("drain", "--address", front.address)
        resumed = await outrider("resume", "--address", front.address)
        assert front.engine.is_serving
    assert (code.name, "draining" in details) == ("UNAVAILABLE", True)
    assert result.exit_code == 0
    assert result.stdout == "draining: 1 running, 0 waiting\nnothing is live\n"
    assert (again.exit_code, again.stdout) == (0, "draining: nothing is live\n")
    assert (resumed.exit_code, resumed.stdout) == (0, "serving\n")


@in_loop
async def test_drain_need_not_wait(outrider, monkeypatch):
    async with serving(steps_by_itself=False) as front:
        call = front.client.call(request_for())
        await front.engine.until(lambda: len(front.engine.live) == 1)
        at_once = await outrider("drain", "--no-wait", "--address", front.address)
        waited = await outrider("drain", "--wait-s", "0", "--address", front.address)
        assert not front.engine.is_serving
        assert len(front.engine.live) == 1
        call.cancel()
    assert (at_once.exit_code, at_once.stdout) == (0, "draining: 0 running, 1 waiting\n")
    assert waited.exit_code == console.EXIT_NO
    assert waited.stderr == "error: requests are live after 0 s; the server drains on\n"


@in_loop
async def test_a_server_resumed_meanwhile_ends_the_wait_with_code_1(outrider, monkeypatch):
    monkeypatch.setattr(drain, "INTERVAL_S", 0.01)
    async with serving(steps_by_itself=False) as front:
        call = front.client.call(request_for())
        await front.engine.until(lambda: len(front.engine.live) == 1)
        drained = asyncio.create_task(outrider("drain", "--address", front.address))
        while front.engine.is_serving:
            await asyncio.sleep(0)
        await front.client.resume()
        result = await drained
        call.cancel()
    assert result.exit_code == console.EXIT_NO
    assert result.stderr == "error: takes requests again: somebody resumed it\n"
