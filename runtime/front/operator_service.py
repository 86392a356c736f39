"""outrider.v1.OperatorService: what is seen and changed while traffic flows. Knows no step and no rank.

Whatever an operator changes is logged with the peer that asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.v1 import operator_pb2, operator_pb2_grpc
from runtime.audit import AUDIT
from runtime.front import operator_messages
from runtime.front.convert import model_message, refuse_unknown_fields
from runtime.front.engine_link import EngineLink
from runtime.front.status import Context, answering

MAX_LOGGED_IDS = 20


class OperatorService(operator_pb2_grpc.OperatorServiceServicer):
    """One instance per server. model_name, version: as clients are told them."""

    def __init__(self, engine: EngineLink, *, model_name: str, version: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._version = version
        self._versions = operator_messages.installed_versions()

    async def GetVerificationPolicy(
        self, message: operator_pb2.GetVerificationPolicyRequest, context: Context
    ) -> operator_pb2.VerificationPolicyState:
        reply = operator_pb2.VerificationPolicyState()
        async with answering(context):
            refuse_unknown_fields(message)
            reply.CopyFrom(operator_messages.policy_message(self._engine.policy))
        return reply

    async def SetVerificationPolicy(
        self, message: operator_pb2.SetVerificationPolicyRequest, context: Context
    ) -> operator_pb2.VerificationPolicyState:
        reply = operator_pb2.VerificationPolicyState()
        async with answering(context):
            refuse_unknown_fields(message)
            policy = operator_messages.policy_of(message.policy)
            expected = message.expected_revision if message.HasField("expected_revision") else None
            state = await self._engine.set_policy(policy, expected)
            AUDIT.info(
                "%s set policy %s: revision %d from step %d",
                context.peer(),
                state.policy,
                state.revision,
                state.effective_step,
            )
            reply.CopyFrom(operator_messages.policy_message(state))
        return reply

    async def GetStatus(
        self, message: operator_pb2.GetStatusRequest, context: Context
    ) -> operator_pb2.GetStatusResponse:
        reply = operator_pb2.GetStatusResponse()
        async with answering(context):
            refuse_unknown_fields(message)
            status = self._engine.status()
            model = model_message(self._engine.description, status.mesh, self._model_name, self._version)
            reply.CopyFrom(operator_messages.status_message(status, model=model, versions=self._versions))
        return reply

    async def ListRequests(
        self, message: operator_pb2.ListRequestsRequest, context: Context
    ) -> operator_pb2.ListRequestsResponse:
        reply = operator_pb2.ListRequestsResponse()
        async with answering(context):
            refuse_unknown_fields(message)
            listed, num_live = self._engine.live_requests(operator_messages.limit_of(message))
            reply.CopyFrom(operator_messages.requests_message(listed, num_live))
        return reply

    async def Drain(self, message: operator_pb2.DrainRequest, context: Context) -> operator_pb2.DrainResponse:
        reply = operator_pb2.DrainResponse()
        async with answering(context):
            refuse_unknown_fields(message)
            self._engine.drain()
            status = self._engine.status()
            reply.state = operator_messages.state_message(status.state)
            reply.running, reply.waiting = status.statistics.running, status.statistics.waiting
            AUDIT.info(
                "%s drains: new requests are refused, %d running and %d waiting ones go on",
                context.peer(),
                reply.running,
                reply.waiting,
            )
        return reply

    async def Resume(self, message: operator_pb2.ResumeRequest, context: Context) -> operator_pb2.ResumeResponse:
        reply = operator_pb2.ResumeResponse()
        async with answering(context):
            refuse_unknown_fields(message)
            self._engine.resume()
            state = self._engine.status().state
            AUDIT.info("%s ended the drain: the server is %s", context.peer(), state.value)
            reply.state = operator_messages.state_message(state)
        return reply

    async def Abort(self, message: operator_pb2.AbortRequest, context: Context) -> operator_pb2.AbortResponse:
        reply = operator_pb2.AbortResponse()
        async with answering(context):
            refuse_unknown_fields(message)
            found = self._engine.abort_by_id(operator_messages.request_ids_of(message))
            if found.aborted:
                AUDIT.info("%s aborted %d requests: %s", context.peer(), len(found.aborted), _some_of(found.aborted))
            reply.aborted.extend(found.aborted)
            reply.unknown.extend(found.unknown)
        return reply

    async def CheckIntegrity(
        self, message: operator_pb2.CheckIntegrityRequest, context: Context
    ) -> operator_pb2.CheckIntegrityResponse:
        reply = operator_pb2.CheckIntegrityResponse()
        async with answering(context):
            refuse_unknown_fields(message)
            report = await self._engine.check_integrity()
            for violation in report.violations:
                AUDIT.error("%s had the state checked: %s", context.peer(), violation)
            reply.violations.extend(report.violations)
            reply.ranks_checked = report.ranks_checked
        return reply


def _some_of(request_ids: Sequence[str]) -> str:
    named = ", ".join(request_ids[:MAX_LOGGED_IDS])
    num_more = len(request_ids) - MAX_LOGGED_IDS
    return f"{named} and {num_more} more" if num_more > 0 else named
