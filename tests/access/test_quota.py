"""How much an identity may do: at a time, and in any minute by a clock of the test."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.access.identity import ANYONE, Identity, Limits, Role
from runtime.access.quota import Quotas
from runtime.access.window import MINUTE_S, TokenWindow
from runtime.front.errors import InvalidRequest, OverQuota


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.25

    def __call__(self) -> float:
        return self.now_s


def someone(name: str = "ada", **limits: int) -> Identity:
    return Identity(name=name, roles=frozenset({Role.GENERATE}), limits=Limits(**limits))


def test_a_window_forgets_after_a_minute_and_tells_when():
    window = TokenWindow()
    window.add(0.5, 10)
    window.add(0.9, 5)
    window.add(30.0, 20)
    assert window.used(60.99) == 35
    assert window.frees_in(59.0, 15) == 2.0
    assert window.frees_in(59.0, 16) == 32.0
    assert window.frees_in(59.0, 36) is None
    assert window.frees_in(59.0, 0) == 0.0
    assert window.used(61.0) == 20
    assert window.used(91.0) == 0


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 9)), max_size=60))
def test_a_window_holds_no_less_than_the_last_minute_and_no_more_than_a_second_longer(steps):
    window, now_s, added = TokenWindow(), 0.0, []
    for wait_s, count in steps:
        now_s += wait_s
        window.add(now_s, count)
        added.append((now_s, count))
        used = window.used(now_s)
        assert sum(n for at, n in added if at > now_s - MINUTE_S) <= used
        assert used <= sum(n for at, n in added if at > now_s - MINUTE_S - 1)


def test_calls_at_a_time_are_counted_by_name_and_given_back():
    quotas, ada = Quotas(), someone(concurrency=2)
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(quotas.call(ada))
        with pytest.raises(OverQuota, match="ada has 2 requests running and may have 2"), quotas.call(ada):
            pass
        with quotas.call(someone("bob", concurrency=1)), quotas.call(ANYONE):
            pass
        # The limit is that of the moment.
        with quotas.call(someone(concurrency=3)):
            pass
    with quotas.call(ada):
        pass


def test_who_is_gone_and_comes_back_while_its_calls_run_has_them_counted():
    quotas, ada = Quotas(), someone(concurrency=1, tokens_per_minute=100)
    with quotas.call(ada) as allowance:
        allowance.set_aside(20, 1, 50)
        quotas.keep(set())
        with pytest.raises(OverQuota, match="1 requests running"), quotas.call(ada):
            pass
        with quotas.call(someone(concurrency=2, tokens_per_minute=100)) as other, pytest.raises(OverQuota):
            other.set_aside(0, 1, 31)
    quotas.keep(set())
    with quotas.call(ada) as allowance:
        allowance.set_aside(50, 1, 50)


def test_a_call_that_fails_gives_back_what_it_held():
    quotas, ada = Quotas(), someone(concurrency=1, tokens_per_minute=100)
    for _ in range(5):
        with contextlib.suppress(KeyError), quotas.call(ada) as allowance:
            allowance.set_aside(50, 1, 50)
            raise KeyError
    with quotas.call(ada) as allowance:
        allowance.set_aside(50, 1, 50)


def test_tokens_that_running_requests_may_take_are_set_aside():
    quotas, ada = Quotas(Clock()), someone(tokens_per_minute=100)
    with quotas.call(ada) as first:
        first.set_aside(10, 2, 30)
        first.spend(10)
        with quotas.call(ada) as second:
            with pytest.raises(OverQuota) as caught:
                second.set_aside(1, 1, 30)
            assert "of ada's 100 a minute 10 are used and 60 set aside" in str(caught.value)
            assert caught.value.retry_after_s == pytest.approx(60.75)
            second.set_aside(1, 1, 29)
            with pytest.raises(OverQuota, match="when running ones have ended") as unknown, quotas.call(ada) as third:
                third.set_aside(50, 1, 1)
            assert unknown.value.retry_after_s is None


def test_what_is_not_used_is_given_back_and_what_is_used_counts_for_a_minute():
    clock = Clock()
    quotas, ada = Quotas(clock), someone(tokens_per_minute=100)
    with quotas.call(ada) as allowance:
        allowance.set_aside(10, 1, 90)
        allowance.spend(10)
        clock.now_s += 30
        allowance.spend(5)
    with quotas.call(ada) as allowance:
        with pytest.raises(OverQuota) as caught:
            allowance.set_aside(80, 1, 10)
        assert caught.value.retry_after_s == pytest.approx(30.75)
        clock.now_s += 30.7
        with pytest.raises(OverQuota):
            allowance.set_aside(80, 1, 10)
        clock.now_s += 0.05
        allowance.set_aside(80, 1, 10)


def test_what_could_never_fit_names_the_field_and_no_time():
    with Quotas().call(someone(tokens_per_minute=100)) as allowance, pytest.raises(InvalidRequest) as caught:
        allowance.set_aside(41, 2, 30)
    assert caught.value.field == "stopping.max_tokens"
    assert "101 tokens (41 of prompt, 2 x 30 of output), and ada has 100 a minute" in caught.value.problem


def test_limits_that_are_new_hold_from_the_next_request_on():
    quotas = Quotas(Clock())
    with quotas.call(someone(tokens_per_minute=100)) as allowance:
        allowance.set_aside(60, 1, 1)
        allowance.spend(60)
    with quotas.call(someone(tokens_per_minute=70)) as allowance, pytest.raises(OverQuota):
        allowance.set_aside(10, 1, 1)
    quotas.keep({"bob"})
    with quotas.call(someone(tokens_per_minute=70)) as allowance:
        allowance.set_aside(10, 1, 1)


@given(st.integers(0, 2**32 - 1))
def test_no_minute_holds_more_than_the_limit(seed):
    """Any mix of requests that start, bring tokens, and end or fail."""
    draw = random.Random(seed)
    clock, limit = Clock(), 200
    quotas, ada = Quotas(clock), someone(tokens_per_minute=limit)
    delivered: deque[tuple[float, int]] = deque()
    running = []
    num_taken = 0
    for _ in range(150):
        clock.now_s += draw.choice((0.0, 0.4, 3.0, 20.0))
        if draw.random() < 0.4:
            stack = ExitStack()
            allowance = stack.enter_context(quotas.call(ada))
            prompt, n, most = draw.randint(1, 40), draw.randint(1, 2), draw.randint(1, 60)
            try:
                allowance.set_aside(prompt, n, most)
            except OverQuota:
                stack.close()
            else:
                num_taken += 1
                allowance.spend(prompt)
                delivered.append((clock.now_s, prompt))
                running.append([stack, allowance, n * most])
        for one in list(running):
            count = min(one[2], draw.randint(0, 15))
            one[1].spend(count)
            one[2] -= count
            delivered.append((clock.now_s, count))
            if not one[2] or draw.random() < 0.1:
                one[0].close()
                running.remove(one)
        while delivered and delivered[0][0] <= clock.now_s - MINUTE_S:
            delivered.popleft()
        assert sum(count for _, count in delivered) <= limit
    for stack, _, _ in running:
        stack.close()
    assert num_taken
    clock.now_s += MINUTE_S + 1
    with quotas.call(ada) as allowance:
        allowance.set_aside(100, 1, 100)  # nothing was kept that nobody holds
