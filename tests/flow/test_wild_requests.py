"""Whatever stands in a request, it is served or refused by name, and those beside it never notice: a fuzz over the
whole message against real ranks."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import grpc
import grpc.aio
import pytest
from fakes.dangerous_constraints import DANGEROUS, UNSOUND
from fakes.whole_calls import sequences_of
from fakes.wild_requests import wild_request
from flow.house import House, heldout, request
from google.protobuf import text_format
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from oracles.days import SEED

from outrider.v1 import inference_pb2

Code = grpc.StatusCode
MAY_BE = {Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.NOT_FOUND, Code.ALREADY_EXISTS}
CONCURRENCY = 12
GAMMA = 2
LONGEST_MS = 300
"""What a request may take that asks for more than a few tokens."""


def bounded(message: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
    stopping = message.stopping
    if stopping.max_tokens > 24 and not (stopping.HasField("time_limit_ms") and stopping.time_limit_ms < LONGEST_MS):
        stopping.time_limit_ms = LONGEST_MS
    return message


async def status_of(house: House, message: inference_pb2.GenerateRequest) -> grpc.StatusCode:
    """How a wild request ends; checks what it brought, or how it was refused."""
    assert house.client is not None
    call = house.client.call(message, timeout=120)
    frames: list[inference_pb2.GenerateResponse] = []
    try:
        frames += [frame async for frame in call]
    except grpc.aio.AioRpcError as error:
        check_refusal(error)
        return error.code()
    sequences_of(message, frames)
    return Code.OK


def check_refusal(error: grpc.aio.AioRpcError) -> None:
    assert error.code() in MAY_BE, error
    if error.code() is Code.INVALID_ARGUMENT:
        status = rpc_status.from_call(error)
        assert status is not None
        bad_request = error_details_pb2.BadRequest()
        assert status.details[0].Unpack(bad_request)
        [violation] = bad_request.field_violations
        assert error.details().startswith(f"{violation.field}: ")


def good_requests() -> list[inference_pb2.GenerateRequest]:
    """Greedy, seeded, and with a grammar: what has one answer, and nothing in it that rounding could turn."""
    greedy, seeded, held = heldout(3)
    made = [
        request(greedy[:60], 10, ignore_eos=True),
        request(seeded[:60], 10, temperature=1.0, seed=7),
        request(held[:60], 10, temperature=0.7, seed=8),
    ]
    made[2].constraint.regex = "[a-z]{2,8}( [a-z]{2,8})*"
    return made


def wild_requests(count: int) -> list[inference_pb2.GenerateRequest]:
    chance = random.Random(SEED)
    return [bounded(wild_request(chance)) for _ in range(count)]


def constrained_requests() -> list[inference_pb2.GenerateRequest]:
    """Each constraint that would take a rank's life, its time, or come out as another one."""
    made = []
    for constraint in (*DANGEROUS.values(), *UNSOUND.values()):
        made.append(request("x", 4))
        setattr(made[-1].constraint, constraint.kind, constraint.text)
    return made


async def storm(house: House, wild: Sequence[inference_pb2.GenerateRequest]) -> Counter[grpc.StatusCode]:
    """Wild requests, and good ones all the while, whose answers are those that they have alone."""
    alone = [await house.generate(one) for one in good_requests()]
    messages = iter(wild)
    codes: Counter[grpc.StatusCode] = Counter()
    num_good = 0

    async def send() -> None:
        for message in messages:
            try:
                codes[await status_of(house, message)] += 1
            except AssertionError as error:
                raise AssertionError(f"{error}\n{text_format.MessageToString(message)[:4000]}") from error

    async def compare() -> None:
        nonlocal num_good
        while True:
            for one, expected in zip(good_requests(), alone, strict=True):
                reply = await house.generate(one)
                assert (reply.ids, reply.text, reply.reason) == (expected.ids, expected.text, expected.reason)
                num_good += 1

    comparing = asyncio.create_task(compare())
    async with asyncio.TaskGroup() as senders:
        for _ in range(CONCURRENCY):
            senders.create_task(send())
    comparing.cancel()
    await asyncio.wait([comparing])
    assert comparing.cancelled(), comparing.exception()
    assert num_good >= 3
    return codes


def weathered(house: House, wild: Sequence[inference_pb2.GenerateRequest]) -> Counter[grpc.StatusCode]:
    """How they ended; the ranks are the same as before, and everything is back."""
    house.set_policy(GAMMA)
    epoch = house.deployment.engine.status().epoch
    codes = house.run(storm(house, wild), timeout_s=3000)
    assert sum(codes.values()) == len(wild)
    house.check_baseline()
    status = house.deployment.engine.status()
    assert (status.epoch, status.outage) == (epoch, ""), "a request took a rank down"
    return codes


def check(house: House, count: int) -> None:
    codes = weathered(house, wild_requests(count))
    assert codes[Code.OK] >= count / 5, codes
    assert codes[Code.INVALID_ARGUMENT] >= count / 20, codes


def test_no_request_is_our_fault_nor_anybody_elses_harm(house: House) -> None:
    check(house, 300)


def test_no_constraint_takes_a_ranks_life_or_its_time(house: House) -> None:
    wild = constrained_requests()
    assert weathered(house, wild) == {Code.INVALID_ARGUMENT: len(wild)}


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_nor_are_ten_thousand(house: House) -> None:
    check(house, 10_000)
