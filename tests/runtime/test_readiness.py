"""Whether requests are taken: reasons against it come and go in any order, and what is said agrees with the state."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.readiness import Readiness
from runtime.status import Losses, ServerState

ACTS = (
    *("start", "withdraw", "wind_down", "stop", "end", "drain", "resume", "lose", "regain", "stall", "move on"),
    *("start", "drain", "resume", "lose", "regain"),
)


def act(readiness: Readiness, name: str) -> None:
    match name:
        case "drain" | "resume":
            readiness.drain(name == "drain")
        case "lose":
            readiness.lose("a rank has ended")
        case "stall" | "move on":
            readiness.stall(name == "stall")
        case _:
            getattr(readiness, name)()


def test_the_time_without_ranks_is_told_while_it_lasts_and_after() -> None:
    now_s = 10.0
    readiness = Readiness(lambda: now_s)
    readiness.start()
    assert readiness.losses == Losses(count=0, seconds=0.0)
    readiness.regain()
    readiness.lose("a rank has ended")
    now_s = 12.5
    assert readiness.losses == Losses(count=1, seconds=2.5)
    readiness.lose("a restart failed")
    now_s = 13.0
    assert readiness.losses == Losses(count=1, seconds=3.0), "one outage, whatever keeps it going"
    readiness.regain()
    now_s = 20.0
    assert readiness.losses == Losses(count=1, seconds=3.0)
    readiness.lose("another")
    now_s = 21.0
    assert readiness.losses == Losses(count=2, seconds=4.0)


@given(st.lists(st.sampled_from(ACTS), max_size=12))
def test_any_order_of_reasons(names: list[str]) -> None:
    readiness = Readiness()
    heard: list[bool] = []
    readiness.add_listener(heard.append)
    ends_told = 0
    for number, name in enumerate(names):
        act(readiness, name)
        done = names[: number + 1]

        def last(one: str, other: str, done: list[str] = done) -> bool:
            """Whether the first came after the second, or the second never did."""
            order = [name for name in done if name in (one, other)]
            return bool(order) and order[-1] == one

        is_closed = "stop" in done or "end" in done
        is_stopping, is_draining = is_closed or "wind_down" in done, last("drain", "resume")
        is_lost = last("lose", "regain")
        reasons = {
            ServerState.STOPPING: is_stopping,
            ServerState.DRAINING: is_draining,
            ServerState.RECOVERING: is_lost,
            ServerState.WITHDRAWING: "withdraw" in done,
            ServerState.STALLED: last("stall", "move on"),
            ServerState.SERVING: True,
        }
        expected = next(state for state, holds in reasons.items() if holds)
        assert readiness.state is expected
        assert readiness.is_serving == ("start" in done and expected is ServerState.SERVING)
        assert readiness.takes_requests == ("start" in done and not (is_closed or is_draining or is_lost))
        assert readiness.outage == ("a rank has ended" if is_lost else "")
        assert readiness.is_stopping == (is_stopping or "withdraw" in done)
        assert readiness.has_ended == ("end" in done)
        assert (heard[-1] if heard else False) == readiness.is_serving, "every change is heard"
        if not readiness.takes_requests:
            says = readiness.explain()
            if "start" not in done:
                assert says == "starting"
            else:
                assert says.startswith(expected.value)
                assert ("a rank has ended" in says) == (expected is ServerState.RECOVERING)
        ends_told |= "end" in done
    repeats = sum(one == other for one, other in pairwise([False, *heard]))
    assert repeats <= ends_told, "and changes only: of health, or that it has ended"


@pytest.mark.parametrize("before", [(), ("drain",), ("lose",), ("withdraw",), ("wind_down",), ("stall",)])
def test_an_end_for_good_is_told_whatever_was_before(before: tuple[str, ...]) -> None:
    readiness = Readiness()
    for name in ("start", *before):
        act(readiness, name)
    heard: list[bool] = []
    readiness.add_listener(lambda is_serving: heard.append(readiness.has_ended))
    readiness.end()
    assert heard == [True]
