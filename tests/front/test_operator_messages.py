"""Operators' messages without a server: every state has its word, and replies fit what clients read."""

from __future__ import annotations

import pytest
from fakes.requests import request

from outrider.v1 import operator_pb2
from runtime.front.bounds import STOCK_LIMIT_BYTES
from runtime.front.convert import MAX_REQUEST_ID_CHARS
from runtime.front.operator_messages import MAX_LISTED, counters_message, request_message, state_message
from runtime.live import LiveRequests, RequestState, RequestStatus
from runtime.request import Usage
from runtime.statistics import Counters
from runtime.status import FrontStatus, Losses, ServerState
from workers.plan import StepResult, StepTimings


@pytest.mark.parametrize("state", ServerState)
def test_every_state_of_the_server_has_its_word(state: ServerState) -> None:
    assert operator_pb2.ServerState.Name(state_message(state)) == f"SERVER_STATE_{state.name}"


@pytest.mark.parametrize("state", RequestState)
def test_every_state_of_a_request_has_its_word(state: RequestState) -> None:
    status = RequestStatus(request=request(1), usage=Usage(prompt=3), state=state, dp_rank=0, age_s=1.0, waited_s=0.5)
    message = request_message(status)
    assert operator_pb2.RequestState.Name(message.state) == f"REQUEST_STATE_{state.name}"
    assert message.HasField("dp_rank"), "zero is a rank"


def test_the_words_of_the_wire_have_states() -> None:
    assert len(operator_pb2.ServerState.keys()) == len(ServerState) + 1
    assert len(operator_pb2.RequestState.keys()) == len(RequestState) + 1


def test_the_longest_list_of_requests_fits_what_a_stock_client_reads() -> None:
    largest = 2**32 - 1
    usage = Usage(
        prompt=largest,
        completion=largest,
        rounds=largest,
        drafted=largest,
        admitted=largest,
        accepted=largest,
        trimmed=largest,
        seed=2**64 - 1,
    )
    status = RequestStatus(
        request=request(1, request_id="x" * MAX_REQUEST_ID_CHARS, priority=-(2**31), max_tokens=largest),
        usage=usage,
        state=RequestState.DECODING,
        dp_rank=largest,
        age_s=1e9,
        waited_s=1e9,
    )
    size_bytes = operator_pb2.ListRequestsResponse(requests=[request_message(status)], total=MAX_LISTED).ByteSize()
    assert MAX_LISTED * size_bytes <= STOCK_LIMIT_BYTES


def test_seconds_of_a_step_go_to_their_own_fields() -> None:
    parts = ("total", "target", "verify", "commit", "draft", "collective", "dispatch", "combine")
    seconds = {f"{part}_s": float(index) for index, part in enumerate(parts, 1)}
    counters = Counters(restarts=9)
    result = StepResult(step_id=1, epoch=1, batches=(), timings=(StepTimings(**seconds),))
    counters.add_step(result, execute_s=20.0, host_s=30.0)
    view = counters.view(dp_ranks=(), waiting=0, requests=LiveRequests(lambda: 0.0).statistics())
    message = counters_message(view, Losses(), FrontStatus())
    told = {**seconds, "rank_s": seconds["total_s"]}
    del told["total_s"]
    assert {name: getattr(message, name) for name in told} == told
    assert (message.execute_s, message.host_s, message.steps, message.restarts) == (20.0, 30.0, 1, 9)


def test_counts_by_position_go_to_their_own_fields() -> None:
    counters = Counters(
        emitted=7,
        trimmed=2,
        rounds=4,
        drafted_per_position=[9, 8],
        admitted_per_position=[7, 6],
        accepted_per_position=[5, 0],
    )
    view = counters.view(dp_ranks=(), waiting=0, requests=LiveRequests(lambda: 0.0).statistics())
    message = counters_message(view, Losses(), FrontStatus())
    assert (message.emitted, message.trimmed, message.rounds) == (7, 2, 4)
    assert list(message.drafted_by_position) == [9, 8]
    assert list(message.admitted_by_position) == [7, 6]
    assert list(message.accepted_by_position) == [5, 0], "a position that none reached is there"


def test_what_the_front_and_the_ranks_met_goes_to_its_own_fields() -> None:
    view = Counters().view(dp_ranks=(), waiting=0, requests=LiveRequests(lambda: 0.0).statistics())
    front = FrontStatus(errors={"Overloaded": 2, "Forbidden": 0})
    message = counters_message(view, Losses(count=3, seconds=4.5), front)
    assert dict(message.errors) == {"Overloaded": 2, "Forbidden": 0}
    assert (message.rank_losses, message.outage_s) == (3, 4.5)
