"""outrider.v1.OperatorService: reads and switches the verification policy. Knows no step; the engine applies it."""

from __future__ import annotations

import logging

from outrider.v1 import operator_pb2, operator_pb2_grpc
from runtime.front import convert
from runtime.front.engine_link import EngineLink
from runtime.front.status import Context, answering

log = logging.getLogger(__name__)


class OperatorService(operator_pb2_grpc.OperatorServiceServicer):
    """One instance per server."""

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine

    async def GetVerificationPolicy(
        self, message: operator_pb2.GetVerificationPolicyRequest, context: Context
    ) -> operator_pb2.VerificationPolicyState:
        return convert.policy_message(self._engine.policy)

    async def SetVerificationPolicy(
        self, message: operator_pb2.SetVerificationPolicyRequest, context: Context
    ) -> operator_pb2.VerificationPolicyState:
        reply = operator_pb2.VerificationPolicyState()
        async with answering(context):
            convert.refuse_unknown_fields(message)
            policy = convert.policy_of(message.policy)
            expected = message.expected_revision if message.HasField("expected_revision") else None
            state = await self._engine.set_policy(policy, expected)
            log.info(
                "%s set policy %s: revision %d from step %d",
                context.peer(),
                state.policy,
                state.revision,
                state.effective_step,
            )
            reply.CopyFrom(convert.policy_message(state))
        return reply
