"""The operator's face over real gRPC: the verification policy, and what every RPC refuses."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest
from fakes.advice import ADVICE
from fakes.front import in_loop, request_for, serving, status_of
from fakes.policies import SOUND_PROFILE
from google.protobuf.message_factory import GetMessageClass

from outrider.v1 import operator_pb2, operator_pb2_grpc
from runtime.verification.view import SpeculationView

Code = grpc.StatusCode
RPCS = {method.name: method for method in operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].methods}
UNKNOWN_FIELD = b"\xc0\x3e\x01"
"""Field 1000."""


@in_loop
async def test_the_policy_is_read_and_switched() -> None:
    async with serving() as front:
        first = await front.client.get_policy()
        assert (first.policy.fixed.gamma, first.revision) == (4, 1)
        front.engine.step_id = 17
        off = await front.client.set_policy(None)
        assert (off.policy.WhichOneof("policy"), off.revision, off.effective_step) == ("off", 2, 17)
        zero = await front.client.set_policy(0, expected_revision=2)
        assert (zero.policy.WhichOneof("policy"), zero.policy.fixed.gamma, zero.revision) == ("fixed", 0, 3)
        assert await front.client.get_policy() == zero


@in_loop
async def test_a_stale_revision_changes_nothing() -> None:
    async with serving() as front:
        await front.client.set_policy(2)
        code, text = await status_of(front.client.set_policy(3, expected_revision=1))
        assert code is Code.ABORTED
        assert "revision 2" in text
        assert (await front.client.get_policy()).policy.fixed.gamma == 2


@pytest.mark.parametrize(
    ("request_message", "field"),
    [
        (operator_pb2.SetVerificationPolicyRequest(), "policy:"),
        (
            operator_pb2.SetVerificationPolicyRequest(
                policy=operator_pb2.VerificationPolicy(fixed=operator_pb2.VerificationPolicy.Fixed(gamma=9))
            ),
            "policy.fixed.gamma:",
        ),
        (
            operator_pb2.SetVerificationPolicyRequest(
                policy=operator_pb2.VerificationPolicy.FromString(UNKNOWN_FIELD), expected_revision=1
            ),
            "policy: field number 1000 is not known",
        ),
        (
            operator_pb2.SetVerificationPolicyRequest(
                policy=operator_pb2.VerificationPolicy(
                    dynamic=operator_pb2.VerificationPolicy.Dynamic.FromString(UNKNOWN_FIELD)
                )
            ),
            "policy.dynamic: field number 1000 is not known",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(
    request_message: operator_pb2.SetVerificationPolicyRequest, field: str
) -> None:
    @in_loop
    async def scenario() -> None:
        async with serving() as front:
            stub = operator_pb2_grpc.OperatorServiceStub(front.client.channel)
            code, text = await status_of(stub.SetVerificationPolicy(request_message))
            assert code is Code.INVALID_ARGUMENT
            assert text.startswith(field)
            assert (await front.client.get_policy()).revision == 1

    scenario()


@in_loop
async def test_a_policy_is_switched_while_requests_run_and_the_log_says_who_did_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "outrider.audit"):
        async with serving(steps_by_itself=False) as front:
            call = front.client.call(request_for(max_tokens=6))
            await front.engine.until(lambda: bool(front.engine.live))
            front.engine.step()
            state = await front.client.set_policy(2)
            assert state.effective_step == 2
            front.engine.step()
            assert sum([len(frame.token_ids) async for frame in call]) == 6
    [line] = caplog.messages
    assert "127.0.0.1:" in line
    assert line.endswith("set policy fixed gamma=2: revision 2 from step 2")


def stub_call(stub: operator_pb2_grpc.OperatorServiceStub, name: str, data: bytes) -> Any:
    return getattr(stub, name)(GetMessageClass(RPCS[name].input_type).FromString(data))


@pytest.mark.parametrize("name", RPCS)
def test_fields_that_nobody_knows_are_refused_before_anything_is_done(name: str) -> None:
    @in_loop
    async def scenario() -> None:
        async with serving(steps_by_itself=False) as front:
            call = front.client.call(request_for(request_id="a"))
            await front.engine.until(lambda: bool(front.engine.live))
            front.engine.drain()
            before = front.engine.status()
            stub = operator_pb2_grpc.OperatorServiceStub(front.client.channel)
            sound = {
                "SetVerificationPolicy": operator_pb2.SetVerificationPolicyRequest(
                    policy=operator_pb2.VerificationPolicy(off=operator_pb2.VerificationPolicy.Off())
                ),
                "Abort": operator_pb2.AbortRequest(request_ids=["a"]),
            }
            data = sound[name].SerializeToString() if name in sound else b""
            front.engine.policies.view, front.engine.policies.advice = SpeculationView(profile=SOUND_PROFILE), ADVICE
            code, text = await status_of(stub_call(stub, name, data + UNKNOWN_FIELD))
            assert code is Code.INVALID_ARGUMENT
            assert text == (
                f"{RPCS[name].input_type.name}: field number 1000 is not known to this server; "
                "leave it out or ask a newer one"
            )
            after = front.engine.status()
            assert (after.state, after.policy, len(front.engine.live)) == (before.state, before.policy, 1)
            answering = stub_call(stub, name, data)
            if name.startswith("Watch"):
                await answering.read()
                answering.cancel()
            else:
                await answering
            call.cancel()

    scenario()


IDS = "request_ids"
EMPTY = operator_pb2.VerificationPolicy()
TOO_MANY = operator_pb2.AbortRequest(request_ids=[str(i) for i in range(1001)])


@pytest.mark.parametrize(
    ("name", "message", "words"),
    [
        ("ListRequests", operator_pb2.ListRequestsRequest(limit=0), "limit: 0 is not from 1 to 1000; leave it out"),
        ("ListRequests", operator_pb2.ListRequestsRequest(limit=1001), "limit: 1001 is not from 1 to 1000"),
        ("AdvisePolicy", operator_pb2.AdvisePolicyRequest(num_sequences=0), "num_sequences: 0 is not from 1 to 4096"),
        ("AdvisePolicy", operator_pb2.AdvisePolicyRequest(num_sequences=4097), "num_sequences: 4097 is not from 1"),
        ("AdvisePolicy", operator_pb2.AdvisePolicyRequest(context=0), "context: 0 is no length of a sequence"),
        ("SetShadowPolicy", operator_pb2.SetShadowPolicyRequest(policy=EMPTY), "policy: none is given"),
        ("SetVerificationPolicy", operator_pb2.SetVerificationPolicyRequest(policy=EMPTY, priority=1), "policy: none"),
        ("Abort", operator_pb2.AbortRequest(), f"{IDS}: is empty; name at least one"),
        ("Abort", TOO_MANY, f"{IDS}: 1001 ids; at most 1000 are taken"),
        ("Abort", operator_pb2.AbortRequest(request_ids=["live", ""]), f"{IDS}[1]: is empty"),
        ("Abort", operator_pb2.AbortRequest(request_ids=["live", "é" * 257]), f"{IDS}[1]: 257 characters long; "),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(name: str, message: Any, words: str) -> None:
    @in_loop
    async def scenario() -> None:
        async with serving(steps_by_itself=False) as front:
            call = front.client.call(request_for(request_id="live"))
            await front.engine.until(lambda: bool(front.engine.live))
            stub = operator_pb2_grpc.OperatorServiceStub(front.client.channel)
            code, text = await status_of(getattr(stub, name)(message))
            assert code is Code.INVALID_ARGUMENT
            assert text.startswith(words)
            assert len(front.engine.live) == 1, "nothing is done of what is refused in part"
            call.cancel()

    scenario()


@in_loop
async def test_the_ends_of_the_bounds_are_taken() -> None:
    async with serving() as front:
        for limit in (1, 1000, None):
            assert (await front.client.list_requests(limit)).total == 0
        ids = ["x" * 256, *(str(i) for i in range(999))]
        assert (await front.client.abort(ids)).unknown == ids
