"""Whatever a client sends, it is served or refused by name; nothing of it is our fault."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import Any

import grpc
import grpc.aio
from fakes.advice import ADVICE
from fakes.front import Front, serving
from fakes.policies import SOUND_PROFILE
from fakes.whole_calls import sequences_of
from fakes.wild_requests import SOUND, UNKNOWN_FIELD, leaf_paths, wild_request
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from outrider.v1 import inference_pb2, operator_pb2, operator_pb2_grpc
from outrider.v1.inference_pb2 import GenerateRequest
from runtime.verification.view import SpeculationView

ODD = 7
"""The roll that makes something wild; hypothesis draws the ends of a range too often for it to be one of them."""
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION}


def mostly(sound: st.SearchStrategy[Any], wild: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One value in ten is wild, so that most requests are not refused for their first field."""
    return st.integers(0, 9).flatmap(lambda roll: wild if roll == ODD else sound)


UINT32 = mostly(st.integers(1, 4095), st.sampled_from([0, 4096, 2**31, 2**32 - 1]))


@st.composite
def optional_fields(draw: st.DrawFn, kind: type[Message], fields: dict[str, st.SearchStrategy[Any]]) -> Message:
    """A message with any subset of some fields, and once in a while one that nobody knows."""
    names = draw(st.sets(st.sampled_from(sorted(fields)))) if fields else ()
    message = kind(**{name: draw(fields[name]) for name in sorted(names)})
    if draw(st.integers(0, 19)) == ODD:
        message.MergeFromString(UNKNOWN_FIELD)
    return message


policies = st.one_of(
    st.just(operator_pb2.VerificationPolicy()),
    st.builds(operator_pb2.VerificationPolicy, off=optional_fields(operator_pb2.VerificationPolicy.Off, {})),
    st.builds(
        operator_pb2.VerificationPolicy,
        fixed=optional_fields(operator_pb2.VerificationPolicy.Fixed, {"gamma": mostly(st.integers(0, 8), UINT32)}),
    ),
    st.builds(
        operator_pb2.VerificationPolicy,
        dynamic=optional_fields(
            operator_pb2.VerificationPolicy.Dynamic,
            {
                "gamma_min": mostly(st.integers(0, 3), UINT32),
                "gamma_max": mostly(st.integers(3, 8), UINT32),
                "objective": st.integers(0, 3),
                "itl_limit_ms": st.floats(),
                "min_gain": mostly(st.floats(0, 1), st.floats()),
                "min_survival": mostly(st.floats(0, 1), st.floats()),
            },
        ),
    ),
)
request_ids = mostly(st.lists(st.text(max_size=9), max_size=9), st.sampled_from([["x" * 257], [""], ["a"] * 1001]))
operations: dict[str, st.SearchStrategy[Message]] = {
    "GetVerificationPolicy": optional_fields(operator_pb2.GetVerificationPolicyRequest, {}),
    "SetVerificationPolicy": optional_fields(
        operator_pb2.SetVerificationPolicyRequest,
        {
            "policy": policies,
            "expected_revision": st.sampled_from([0, 1, 2, 2**64 - 1]),
            "priority": st.sampled_from([0, 1, -(2**31), 2**31 - 1]),
        },
    ),
    "WatchVerificationPolicy": optional_fields(operator_pb2.WatchVerificationPolicyRequest, {}),
    "SetShadowPolicy": optional_fields(operator_pb2.SetShadowPolicyRequest, {"policy": policies}),
    "AdvisePolicy": optional_fields(
        operator_pb2.AdvisePolicyRequest, {"num_sequences": mostly(st.integers(1, 99), UINT32), "context": UINT32}
    ),
    "GetStatus": optional_fields(operator_pb2.GetStatusRequest, {}),
    "ListRequests": optional_fields(operator_pb2.ListRequestsRequest, {"limit": UINT32}),
    "Drain": optional_fields(operator_pb2.DrainRequest, {}),
    "Resume": optional_fields(operator_pb2.ResumeRequest, {}),
    "Abort": optional_fields(operator_pb2.AbortRequest, {"request_ids": request_ids}),
    "CheckIntegrity": optional_fields(operator_pb2.CheckIntegrityRequest, {}),
    "Reload": optional_fields(operator_pb2.ReloadRequest, {}),
}


async def answer(front: Front, request: GenerateRequest) -> grpc.StatusCode:
    """The status of one request; checks the frames, or that the refusal names a field."""
    call = front.client.call(request, timeout=10)
    frames: list[inference_pb2.GenerateResponse] = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        frames += [frame async for frame in call]
    code = await call.code()
    if code is grpc.StatusCode.OK:
        sequences_of(request, frames)
    else:
        assert ": " in await call.details()
    assert not front.engine.live
    return code


async def operate(front: Front, name: str, message: Message) -> grpc.StatusCode:
    """The status of one operator's request; checks that a refusal names what is wrong."""
    call = getattr(operator_pb2_grpc.OperatorServiceStub(front.client.channel), name)(message, timeout=10)
    with contextlib.suppress(grpc.aio.AioRpcError):
        if name.startswith("Watch"):
            assert (await call.read()).revision == front.engine.policies.state.revision
            call.cancel()
            return grpc.StatusCode.OK
        await call
    code, text = await call.code(), await call.details()
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
        assert ": " in text
    elif code is grpc.StatusCode.ABORTED:
        assert "the policy is at revision" in text
    else:
        assert code is grpc.StatusCode.OK, (code, text)
    return code


@contextmanager
def server_in_a_thread() -> Iterator[tuple[Front, asyncio.AbstractEventLoop]]:
    """One server for all examples: hypothesis is not async, so the loop runs beside it."""
    started: Future[tuple[Front, asyncio.AbstractEventLoop]] = Future()
    end = asyncio.Event()

    async def serve() -> None:
        async with serving([*range(60, 300), 0], run_length=8) as front:
            front.engine.policies.view, front.engine.policies.advice = SpeculationView(profile=SOUND_PROFILE), ADVICE
            started.set_result((front, asyncio.get_running_loop()))
            await end.wait()

    with ThreadPoolExecutor(1) as threads:
        served = threads.submit(asyncio.run, serve())
        front, loop = started.result(10)
        try:
            yield front, loop
        finally:
            loop.call_soon_threadsafe(end.set)
            served.result(10)


def test_every_field_has_sound_values() -> None:
    assert set(leaf_paths(GenerateRequest.DESCRIPTOR)) == set(SOUND)


def test_no_request_is_our_fault() -> None:
    codes: Counter[grpc.StatusCode] = Counter()
    with server_in_a_thread() as (front, loop):
        # A seed, since so large a message leaves hypothesis nothing to shrink.
        @given(st.integers(0, 2**64 - 1))
        def examples(seed: int) -> None:
            request = wild_request(Random(seed))
            code = asyncio.run_coroutine_threadsafe(answer(front, request), loop).result(15)
            codes[code] += 1
            assert code is grpc.StatusCode.OK or code in REFUSALS

        examples()
    assert codes[grpc.StatusCode.OK] >= 4, codes
    assert sum(codes[code] for code in REFUSALS) >= 10, codes


def test_no_request_of_an_operator_is_our_fault() -> None:
    assert set(operations) == {
        method.name for method in operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].methods
    }
    codes: Counter[grpc.StatusCode] = Counter()
    with server_in_a_thread() as (front, loop):

        @given(st.sampled_from(sorted(operations)).flatmap(lambda name: st.tuples(st.just(name), operations[name])))
        def examples(operation: tuple[str, Message]) -> None:
            codes[asyncio.run_coroutine_threadsafe(operate(front, *operation), loop).result(15)] += 1

        examples()
    assert codes[grpc.StatusCode.OK] >= 4, codes
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] >= 4, codes
