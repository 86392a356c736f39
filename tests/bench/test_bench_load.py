"""Loads, policies and the order of cells; the loops that send, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import statistics

import pytest
from fakes.bench import asked_of
from hypothesis import given
from hypothesis import strategies as st

from configs.load import SettingsError
from runtime.bench.generator import closed_loop, open_loop
from runtime.bench.load import (
    Bounds,
    Closed,
    Open,
    Policy,
    parse_concurrencies,
    parse_policies,
    parse_rates,
    poisson_arrivals,
    schedule,
)


def test_lists_and_repeated_options_are_the_same():
    assert parse_policies(["off,fixed:2", "fixed:4", "off"]) == [Policy(None), Policy(2), Policy(4)]
    assert parse_concurrencies(["1, 4", "16"]) == [Closed(1), Closed(4), Closed(16)]
    assert parse_rates(["0.5", "2,8"]) == [Open(0.5), Open(2.0), Open(8.0)]


def test_a_dynamic_policy_keeps_to_its_bounds_in_any_order_and_says_them():
    found = parse_policies(["dynamic", "dynamic:itl=30", "dynamic:max=4:min=1", "dynamic:min=1:max=4", "dynamic:max=0"])
    assert [policy.dynamic for policy in found] == [
        Bounds(),
        Bounds(itl_limit_ms=30.0),
        Bounds(gamma_min=1, gamma_max=4),
        Bounds(gamma_max=0),
    ]
    assert list(map(str, found)) == ["dynamic", "dynamic:itl=30", "dynamic:min=1:max=4", "dynamic:max=0"]
    assert parse_policies([",".join(map(str, found))]) == found
    assert {policy.num_drafts for policy in found} == {None}
    assert [policy.least_gamma_max for policy in found] == [1, 1, 4, 1]
    assert [policy.num_drafts for policy in parse_policies(["off,fixed:3"])] == [0, 3]


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_policies, "fixed", "not off, fixed:N or dynamic, as in fixed:4"),
        (parse_policies, "fixed:-1", "--policy 'fixed:-1'"),
        (parse_policies, "off:2", "--policy 'off:2'"),
        (parse_policies, "off,", "--policy ''"),
        (parse_policies, "fixed:" + "9" * 5000, "not off, fixed:N or dynamic, as in fixed:4"),
        (parse_policies, "dynamic:", "--policy 'dynamic:'"),
        (parse_policies, "dynamic:4", "'4' is none of min=N, max=N and itl=MS"),
        (parse_policies, "dynamic:max=4:max=2", "'max=2' is none of min=N, max=N and itl=MS, each once"),
        (parse_policies, "dynamic:max=-1", "max is '-1'; give drafts per round, as max=2"),
        (parse_policies, "dynamic:min=x", "min is 'x'; give drafts per round, as min=2"),
        (parse_policies, "dynamic:min=3:max=2", "min is above max"),
        (parse_policies, "dynamic:itl=0", "itl is '0'; give milliseconds above 0, as itl=30"),
        (parse_policies, "dynamic:itl=inf", "itl is 'inf'; give milliseconds above 0"),
        (parse_concurrencies, "0", "from 1 to 4096"),
        (parse_concurrencies, "1" * 5000, "from 1 to 4096"),
        (parse_concurrencies, "4x", "--concurrency '4x'"),
        (parse_rates, "0", "from 0.0001 to"),
        (parse_rates, "nan", "--rate 'nan'"),
        (parse_rates, "inf", "--rate 'inf'"),
        (parse_rates, "1" * 5000, "from 0.0001 to"),
        (parse_rates, "2,0.12345678,0.12345679", "0.12345678 and 0.12345679 would both be reported as 0.123457/s"),
    ],
)
def test_what_is_no_load_or_policy_is_refused_with_the_remedy(parse, text, words):
    with pytest.raises(SettingsError, match=words.replace("(", r"\(")):
        parse([text])


@pytest.mark.parametrize(
    ("loads", "number"),
    [
        ((Closed(1), Closed(4)), 8),
        ((Closed(1), Closed(16), Closed(4)), 16),
        ((Closed(12), Open(2.0)), 12),
        ((Open(2.0), Open(4.0)), 16),
    ],
)
def test_all_loads_have_the_same_number_of_requests_and_each_of_its_clients_has_one(loads, number):
    asked = asked_of(requests=None, loads=loads, repeats=2, warmup=3)
    assert asked.requests_per_cell == asked.most_requests == number
    # Before a first repeat as many as in it, before the second three; two policies.
    assert asked.total_requests == len(loads) * 2 * (3 * number + 3)
    assert asked_of(requests=5, loads=loads).requests_per_cell == 5


def test_cells_alternate_policies_and_each_repeat_begins_with_another():
    policies = [Policy(None), Policy(2), Policy(4)]
    slots = schedule([Closed(1), Closed(4)], policies, 2)
    assert len(slots) == len(set(slots)) == 12
    assert [slot.policy for slot in slots[:3]] == policies
    assert [slot.policy for slot in slots[6:9]] == [Policy(2), Policy(4), Policy(None)]
    assert [slot.load for slot in slots[:6]] == [Closed(1)] * 3 + [Closed(4)] * 3
    assert [slot.repeat for slot in slots] == [0] * 6 + [1] * 6


@given(st.floats(0.01, 1000), st.integers(1, 50), st.integers(0, 2**64))
def test_arrivals_of_a_seed_are_the_same_and_rise(rate, number, seed):
    arrivals = poisson_arrivals(rate, number, seed)
    assert arrivals == poisson_arrivals(rate, number, seed)
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == number
    assert min(arrivals) >= 0


def test_arrivals_come_at_the_rate_and_their_gaps_spread_as_wide():
    arrivals = poisson_arrivals(8.0, 20_000, seed=3)
    gaps = [later - earlier for earlier, later in zip([0.0, *arrivals], arrivals, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert poisson_arrivals(8.0, 3, seed=4) != arrivals[:3]


class VirtualTime:
    """A clock that moves when somebody sleeps on it, by some more than asked where it oversleeps."""

    def __init__(self, oversleeps_s: float = 0.0) -> None:
        self.now_s = 50.0
        self._oversleeps_s = oversleeps_s

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        await asyncio.sleep(0)  # what is ready runs before time passes
        self.now_s += seconds + self._oversleeps_s


def test_a_closed_loop_keeps_its_clients_busy_and_no_more():
    time, busy, most = VirtualTime(), 0, 0

    async def send(number: int, due_s: float) -> int:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        for _ in range(number % 3 + 1):
            await asyncio.sleep(0)
        busy -= 1
        return number * 10

    assert asyncio.run(closed_loop(send, 20, 3, time.clock)) == [number * 10 for number in range(20)]
    assert most == 3
    assert asyncio.run(closed_loop(send, 1, 8, time.clock)) == [0]


def test_an_open_loop_sends_when_requests_are_due_however_many_are_under_way():
    time, release = VirtualTime(), asyncio.Event()
    started: list[tuple[int, float, float]] = []

    async def send(number: int, due_s: float) -> int:
        started.append((number, due_s, time.now_s))
        if number == 2:
            release.set()
        await release.wait()
        return number

    assert asyncio.run(open_loop(send, [1.0, 1.5, 4.0], time.clock, time.sleep)) == [0, 1, 2]
    assert started == [(0, 51.0, 51.0), (1, 51.5, 51.5), (2, 54.0, 54.0)]


def test_an_open_loop_that_is_late_keeps_the_due_times():
    time = VirtualTime(oversleeps_s=0.75)

    async def send(number: int, due_s: float) -> tuple[float, float]:
        return due_s, time.now_s

    found = asyncio.run(open_loop(send, [1.0, 1.5, 1.6, 4.0], time.clock, time.sleep))
    assert [due_s for due_s, _ in found] == [51.0, 51.5, 51.6, 54.0]
    assert [round(sent_s - due_s, 9) for due_s, sent_s in found] == [0.75, 0.25, 0.15, 0.75]


def test_a_request_that_breaks_ends_the_loop():
    async def send(number: int, due_s: float) -> int:
        if number == 1:
            raise ZeroDivisionError
        await asyncio.Event().wait()
        return number

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(closed_loop(send, 4, 2, VirtualTime().clock))
    assert caught.group_contains(ZeroDivisionError)


def test_loads_of_one_acceptance_are_measured_together_with_all_their_repeats():
    policies, loads = [Policy(None), Policy(2)], [Closed(1), Closed(1, 0.6), Open(2.0), Open(2.0, 0.6)]
    slots = schedule(loads, policies, 2)
    assert len(slots) == len(set(slots)) == 16
    assert [slot.load.acceptance for slot in slots] == [None] * 8 + [0.6] * 8
    assert [slot.repeat for slot in slots] == ([0] * 4 + [1] * 4) * 2
    assert str(Closed(4, 0.6)) == "4 at a time, α=0.6"
    assert str(Open(2.0, 0.6)) == "2/s, α=0.6"
