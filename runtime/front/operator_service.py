"""outrider.v1.OperatorService: what is seen and changed while traffic flows. Knows no step and no rank.

Whatever an operator changes is logged with the peer that asked for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from outrider.v1 import operator_pb2, operator_pb2_grpc
from runtime.access.identity import CALLER
from runtime.audit import audit, named
from runtime.front import operator_messages, policy_messages
from runtime.front.convert import refuse_unknown_fields
from runtime.front.engine_link import EngineLink
from runtime.front.policy_watch import PolicyWatches
from runtime.front.replies import model_message
from runtime.front.status import Context, answering
from runtime.reload import Reloaded
from runtime.status import FrontStatus
from runtime.verification.policy import PolicyState

MAX_LOGGED_IDS = 20


class OperatorService(operator_pb2_grpc.OperatorServiceServicer):
    """One instance per server. look: a moment of the front. reload: reads the configuration again, for whom it is
    given. model_name, version: as clients are told them."""

    def __init__(
        self,
        engine: EngineLink,
        look: Callable[[], FrontStatus],
        reload: Callable[[str], Awaitable[Reloaded]],
        *,
        model_name: str,
        version: str,
    ) -> None:
        self._engine = engine
        self._look = look
        self._reload = reload
        self._model_name = model_name
        self._version = version
        self._watches = PolicyWatches(engine.policies)
        self._setting: set[asyncio.Task[PolicyState]] = set()

    async def stop(self, timeout_s: float) -> None:
        """Ends the calls that go on without end; returns when they have, after `timeout_s` at the latest."""
        await self._watches.stop(timeout_s)

    async def GetVerificationPolicy(
        self, message: operator_pb2.GetVerificationPolicyRequest, context: Context
    ) -> operator_pb2.VerificationPolicyState:
        reply = operator_pb2.VerificationPolicyState()
        async with answering(context):
            refuse_unknown_fields(message)
            reply.CopyFrom(self._policy_state(self._engine.policies.state))
        return reply

    async def SetVerificationPolicy(
        self, message: operator_pb2.SetVerificationPolicyRequest, context: Context
    ) -> operator_pb2.VerificationPolicyState:
        reply = operator_pb2.VerificationPolicyState()
        async with answering(context):
            refuse_unknown_fields(message)
            # A client that leaves meanwhile ends its call, not the change, nor the line that names it.
            setting = asyncio.create_task(self._set_policy(message, context.peer()))
            self._setting.add(setting)
            setting.add_done_callback(self._forget)
            reply.CopyFrom(self._policy_state(await asyncio.shield(setting)))
        return reply

    async def WatchVerificationPolicy(
        self, message: operator_pb2.WatchVerificationPolicyRequest, context: Context
    ) -> None:
        """Writes for as long as the client listens and the server runs."""
        async with answering(context):
            refuse_unknown_fields(message)
            with self._watches.open() as watch:
                while True:
                    await context.write(self._policy_state(self._engine.policies.state))
                    await watch.next_change()

    async def SetShadowPolicy(
        self, message: operator_pb2.SetShadowPolicyRequest, context: Context
    ) -> operator_pb2.ShadowStatus:
        reply = operator_pb2.ShadowStatus()
        async with answering(context):
            refuse_unknown_fields(message)
            policy = policy_messages.shadow_of(message)
            shadow = self._engine.policies.set_shadow(policy)
            told = "ended the shadow policy" if policy is None else f"set shadow policy {policy}"
            audit("SetShadowPolicy", told, peer=context.peer(), policy=None if policy is None else str(policy))
            reply.CopyFrom(policy_messages.shadow_message(shadow))
        return reply

    async def AdvisePolicy(
        self, message: operator_pb2.AdvisePolicyRequest, context: Context
    ) -> operator_pb2.AdvisePolicyResponse:
        reply = operator_pb2.AdvisePolicyResponse()
        async with answering(context):
            refuse_unknown_fields(message)
            num_sequences, length = policy_messages.load_of(message)
            report = self._engine.policies.advise(num_sequences=num_sequences, context=length)
            reply.CopyFrom(policy_messages.advice_message(report))
        return reply

    async def GetStatus(
        self, message: operator_pb2.GetStatusRequest, context: Context
    ) -> operator_pb2.GetStatusResponse:
        reply = operator_pb2.GetStatusResponse()
        async with answering(context):
            refuse_unknown_fields(message)
            status = self._engine.status()
            model = model_message(self._engine.description, status.mesh, self._model_name, self._version)
            reply.CopyFrom(operator_messages.status_message(status, self._look(), model=model))
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
            audit(
                "Drain",
                f"drains: new requests are refused, {reply.running} running and {reply.waiting} waiting ones go on",
                peer=context.peer(),
                running=reply.running,
                waiting=reply.waiting,
            )
        return reply

    async def Resume(self, message: operator_pb2.ResumeRequest, context: Context) -> operator_pb2.ResumeResponse:
        reply = operator_pb2.ResumeResponse()
        async with answering(context):
            refuse_unknown_fields(message)
            self._engine.resume()
            state = self._engine.status().state
            audit("Resume", f"ended the drain: the server is {state.value}", peer=context.peer(), state=state.value)
            reply.state = operator_messages.state_message(state)
        return reply

    async def Abort(self, message: operator_pb2.AbortRequest, context: Context) -> operator_pb2.AbortResponse:
        reply = operator_pb2.AbortResponse()
        async with answering(context):
            refuse_unknown_fields(message)
            found = self._engine.abort_by_id(operator_messages.request_ids_of(message))
            audit(
                "Abort",
                f"aborted {len(found.aborted)} requests: {_some_of(found.aborted) or 'none is live'}",
                peer=context.peer(),
                aborted=found.aborted[:MAX_LOGGED_IDS],
                unknown=found.unknown[:MAX_LOGGED_IDS],
            )
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
            audit(
                "CheckIntegrity",
                f"had the state checked: {'; '.join(report.violations) or 'all invariants hold'}",
                peer=context.peer(),
                level=logging.ERROR if report.violations else logging.INFO,
                violations=report.violations,
            )
            reply.violations.extend(report.violations)
            reply.ranks_checked = report.ranks_checked
        return reply

    async def Reload(self, message: operator_pb2.ReloadRequest, context: Context) -> operator_pb2.ReloadResponse:
        reply = operator_pb2.ReloadResponse()
        async with answering(context):
            refuse_unknown_fields(message)
            reloaded = await self._reload(context.peer())
            reply.applied.extend(reloaded.applied)
            for key, reason in reloaded.held_back.items():
                reply.held_back.add(key=key, reason=reason)
        return reply

    async def _set_policy(self, message: operator_pb2.SetVerificationPolicyRequest, peer: str) -> PolicyState:
        policy, priority = policy_messages.change_of(message)
        expected = message.expected_revision if message.HasField("expected_revision") else None
        by = named(CALLER.get(), peer)
        state = await self._engine.policies.set(policy, expected, priority=priority, set_by=by)
        what = "as of the others" if policy is None else str(policy)
        whose = "" if priority is None else f" for priority {priority}"
        audit(
            "SetVerificationPolicy",
            f"set policy {what}{whose}: revision {state.revision} from step {state.effective_step}",
            peer=peer,
            policy=what,
            priority=priority,
            revision=state.revision,
            step=state.effective_step,
        )
        return state

    def _forget(self, setting: asyncio.Task[PolicyState]) -> None:
        self._setting.discard(setting)
        if not setting.cancelled():
            setting.exception()  # looked at here, since nobody else may be there to do so

    def _policy_state(self, state: PolicyState) -> operator_pb2.VerificationPolicyState:
        fallback = self._engine.status().speculation.fallback
        return policy_messages.policy_state_message(state, fallback=fallback)


def _some_of(request_ids: Sequence[str]) -> str:
    named = ", ".join(request_ids[:MAX_LOGGED_IDS])
    num_more = len(request_ids) - MAX_LOGGED_IDS
    return f"{named} and {num_more} more" if num_more > 0 else named
