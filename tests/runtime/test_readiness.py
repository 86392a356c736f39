"""Whether requests are taken: reasons against it come and go in any order, and what is said agrees with the state."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from runtime.readiness import Readiness
from runtime.status import ServerState

ACTS = ("start", "stop", "drain", "resume", "lose", "regain")


def act(readiness: Readiness, name: str) -> None:
    match name:
        case "drain" | "resume":
            readiness.drain(name == "drain")
        case "lose":
            readiness.lose("a rank has ended")
        case _:
            getattr(readiness, name)()


@given(st.lists(st.sampled_from(ACTS), max_size=12))
def test_any_order_of_reasons(names: list[str]) -> None:
    readiness = Readiness()
    heard: list[bool] = []
    readiness.add_listener(heard.append)
    for number, name in enumerate(names):
        act(readiness, name)
        done = names[: number + 1]

        def last(one: str, other: str, done: list[str] = done) -> bool:
            """Whether the first came after the second, or the second never did."""
            order = [name for name in done if name in (one, other)]
            return bool(order) and order[-1] == one

        is_stopping, is_draining = "stop" in done, last("drain", "resume")
        is_lost = last("lose", "regain")
        expected = (
            ServerState.STOPPING
            if is_stopping
            else ServerState.DRAINING
            if is_draining
            else ServerState.RECOVERING
            if is_lost
            else ServerState.SERVING
        )
        assert readiness.state is expected
        assert readiness.is_serving == ("start" in done and expected is ServerState.SERVING)
        assert readiness.outage == ("a rank has ended" if is_lost else "")
        assert readiness.is_stopping == is_stopping
        assert (heard[-1] if heard else False) == readiness.is_serving, "every change is heard"
        if not readiness.is_serving:
            says = readiness.explain()
            if "start" not in done:
                assert says == "starting"
            else:
                assert says.startswith(expected.value)
                assert ("a rank has ended" in says) == (expected is ServerState.RECOVERING)
    assert all(one != other for one, other in pairwise(heard)), "and changes only"
