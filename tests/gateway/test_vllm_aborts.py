"""Aborts by id: of what is live, of what is still to come, and of nothing that has ended."""

from __future__ import annotations

import asyncio

import pytest
from fakes.front import in_loop
from hypothesis import given
from hypothesis import strategies as st

from runtime.front.errors import AbortedByCaller
from runtime.front.vllm.aborts import EARLY_S, MAX_REMEMBERED, Abortable, Aborts, Recent


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def is_aborted(call: Abortable) -> bool:
    try:
        async with call.waiting():
            return False
    except AbortedByCaller:
        return True


@in_loop
async def test_a_wait_ends_with_the_abort_and_so_do_later_ones() -> None:
    found = Aborts()
    with found.call("me", "a") as call:

        async def wait() -> None:
            async with call.waiting():
                await asyncio.Event().wait()

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        found.abort("me", ["a", "a"])
        found.abort("me", ["a"])
        with pytest.raises(AbortedByCaller):
            await waiting
        assert await is_aborted(call)


@in_loop
async def test_an_abort_beside_a_cancelled_call_leaves_it_cancelled() -> None:
    found = Aborts()
    with found.call("me", "a") as call:

        async def wait() -> None:
            async with call.waiting():
                await asyncio.Event().wait()

        for abort_first in (True, False):
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0)
            for act in (call.abort, waiting.cancel) if abort_first else (waiting.cancel, call.abort):
                act()
            with pytest.raises((asyncio.CancelledError, AbortedByCaller)):
                await waiting
            call = Abortable(is_aborted=False)


@in_loop
async def test_a_timeout_of_the_work_itself_is_no_abort() -> None:
    with pytest.raises(TimeoutError):
        async with Abortable(is_aborted=False).waiting():
            raise TimeoutError


@in_loop
async def test_an_early_abort_is_remembered_for_a_while_and_once() -> None:
    clock = Clock()
    found = Aborts(clock)
    found.abort("me", ["early", "late"])
    with found.call("me", "early") as call:
        assert await is_aborted(call)
    with found.call("me", "early") as again:
        assert not await is_aborted(again)
    clock.now_s = EARLY_S
    with found.call("me", "late") as call:
        assert not await is_aborted(call)


@in_loop
async def test_an_abort_that_comes_late_does_not_hit_a_retry_under_the_same_id() -> None:
    clock = Clock()
    found = Aborts(clock)
    with found.call("me", "a"):
        pass
    clock.now_s = EARLY_S - 1
    found.abort("me", ["a"])
    with found.call("me", "a") as retry:
        assert not await is_aborted(retry)


@in_loop
async def test_ids_are_matched_as_a_whole_and_among_the_callers_own() -> None:
    found = Aborts()
    with found.call("me", "abc") as call:
        found.abort("me", ["ab", "abcd", "ABC", "a*", "%"])
        found.abort("you", ["abc"])
        assert not await is_aborted(call)
        found.abort("me", ["abc"])
        assert await is_aborted(call)


@in_loop
async def test_all_calls_of_an_id_are_aborted() -> None:
    found = Aborts()
    with found.call("me", "a") as first:
        with found.call("me", "a") as second:
            found.abort("me", ["a"])
            assert await is_aborted(first)
            assert await is_aborted(second)
        with found.call("me", "a") as third:
            assert not await is_aborted(third)


@in_loop
async def test_what_is_remembered_is_bounded_and_the_oldest_goes_first() -> None:
    found = Aborts()
    found.abort("me", [str(number) for number in range(MAX_REMEMBERED + 1)])
    with found.call("me", "0") as forgotten, found.call("me", "1") as kept:
        assert not await is_aborted(forgotten)
        assert await is_aborted(kept)


def test_nothing_is_kept_for_longer_than_it_is_of_use() -> None:
    clock = Clock()
    recent = Recent(clock)
    for second in range(100):
        clock.now_s = float(second)
        recent.note(("me", str(second)))
        assert len(recent) <= EARLY_S
    assert ("me", "99") in recent
    assert ("me", "69") not in recent


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["begin", "end", "abort"]))))
def test_a_call_is_aborted_if_and_only_if_an_abort_came_early_or_while_it_was_live(acts: list[tuple[str, str]]) -> None:
    """Against the rule in words, over all orders of arrival."""
    found = Aborts(lambda: 1.0)
    live: dict[str, tuple[object, Abortable]] = {}
    expected: dict[str, bool] = {}
    early: set[str] = set()
    ended: set[str] = set()
    for name, act in acts:
        if act == "begin" and name not in live:
            scope = found.call("me", name)
            live[name] = scope, scope.__enter__()
            expected[name] = name in early
            early.discard(name)
        elif act == "end" and name in live:
            scope, call = live.pop(name)
            assert call._is_aborted is expected[name]
            scope.__exit__(None, None, None)  # type: ignore[attr-defined]
            ended.add(name)
        elif act == "abort":
            found.abort("me", [name])
            if name in live:
                expected[name] = True
            elif name not in ended:
                early.add(name)
    assert {name: call._is_aborted for name, (_, call) in live.items()} == {name: expected[name] for name in live}
