"""The operator's face over real gRPC: reading and switching the verification policy."""

from __future__ import annotations

import grpc
import pytest
from fakes.front import in_loop, serving, status_of

from outrider.v1 import operator_pb2, operator_pb2_grpc

Code = grpc.StatusCode


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
