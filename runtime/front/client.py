"""A small asyncio client of the public services, for the command line and for tests. Knows nothing of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import inference_pb2, inference_pb2_grpc, operator_pb2, operator_pb2_grpc
from runtime.front.credentials import BearingChannel, Credentials
from workers.channel import PLAIN, make_async_channel

GenerateCall = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
PolicyCall = grpc.aio.UnaryStreamCall[operator_pb2.WatchVerificationPolicyRequest, operator_pb2.VerificationPolicyState]


class OutriderClient:
    """One channel to one server; `async with` closes it. Errors of the server are `grpc.aio.AioRpcError`."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """address: host:port. Dials on first use. credentials: None speaks plain text and says nothing of who calls.

        Raises SettingsError for credentials whose files cannot be used.
        """
        channel = make_async_channel(address, PLAIN if credentials is None else credentials.security())
        token = None if credentials is None else credentials.token
        self.channel = channel if token is None else BearingChannel(channel, token)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self._operator = operator_pb2_grpc.OperatorServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self.channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> OutriderClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self.channel.close(None)

    def call(self, request: inference_pb2.GenerateRequest, **options: Any) -> GenerateCall:
        """Generate as gRPC's own call object, for metadata, deadline and status.

        options: those of a gRPC call, such as `timeout` in seconds and `metadata`.
        """
        call: GenerateCall = self._inference.Generate(request, **options)
        return call

    async def generate(
        self, request: inference_pb2.GenerateRequest, **options: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Frames of one request, of all its sequences as they come; the last of each carries `finish`. Closing the
        iterator early cancels the request.

        options: as in `call`.
        """
        call = self.call(request, **options)
        try:
            async for frame in call:
                yield frame
        finally:
            call.cancel()

    async def get_model(self) -> inference_pb2.GetModelResponse:
        reply: inference_pb2.GetModelResponse = await self._inference.GetModel(inference_pb2.GetModelRequest())
        return reply

    async def tokenize(self, text: str) -> list[int]:
        """Ids of a text."""
        return await self._tokenize(inference_pb2.TokenizeRequest(text=text))

    async def tokenize_chat(self, chat: inference_pb2.Chat) -> list[int]:
        """Ids of a chat rendered with the served checkpoint's template."""
        return await self._tokenize(inference_pb2.TokenizeRequest(chat=chat))

    async def get_policy(self) -> operator_pb2.VerificationPolicyState:
        request = operator_pb2.GetVerificationPolicyRequest()
        state: operator_pb2.VerificationPolicyState = await self._operator.GetVerificationPolicy(request)
        return state

    async def set_policy(
        self, gamma: int | None, *, expected_revision: int | None = None
    ) -> operator_pb2.VerificationPolicyState:
        """Switches speculation. gamma: drafts per round, None for off. expected_revision: refuse if it is another."""
        policy = operator_pb2.VerificationPolicy()
        if gamma is None:
            policy.off.SetInParent()
        else:
            policy.fixed.gamma = gamma
        return await self.switch_policy(policy, expected_revision=expected_revision)

    async def switch_policy(
        self,
        policy: operator_pb2.VerificationPolicy | None,
        *,
        expected_revision: int | None = None,
        priority: int | None = None,
    ) -> operator_pb2.VerificationPolicyState:
        """Puts a policy in force. expected_revision: refuse if it is another. priority: only for its requests; they
        follow the others again where the policy is None."""
        request = operator_pb2.SetVerificationPolicyRequest(
            policy=policy, expected_revision=expected_revision, priority=priority
        )
        state: operator_pb2.VerificationPolicyState = await self._operator.SetVerificationPolicy(request)
        return state

    def watch_policy(self) -> PolicyCall:
        """The policy in force, and each change of it, as gRPC's own call object."""
        call: PolicyCall = self._operator.WatchVerificationPolicy(operator_pb2.WatchVerificationPolicyRequest())
        return call

    async def set_shadow(self, policy: operator_pb2.VerificationPolicy | None) -> operator_pb2.ShadowStatus:
        """Has a policy planned beside the one in force; None ends that."""
        request = operator_pb2.SetShadowPolicyRequest(policy=policy)
        shadow: operator_pb2.ShadowStatus = await self._operator.SetShadowPolicy(request)
        return shadow

    async def advise(
        self, *, num_sequences: int | None = None, context: int | None = None
    ) -> operator_pb2.AdvisePolicyResponse:
        """What each draft length would bring; None takes the server's present load. context: tokens."""
        request = operator_pb2.AdvisePolicyRequest(num_sequences=num_sequences, context=context)
        reply: operator_pb2.AdvisePolicyResponse = await self._operator.AdvisePolicy(request)
        return reply

    async def get_status(self) -> operator_pb2.GetStatusResponse:
        status: operator_pb2.GetStatusResponse = await self._operator.GetStatus(operator_pb2.GetStatusRequest())
        return status

    async def list_requests(self, limit: int | None = None) -> operator_pb2.ListRequestsResponse:
        """Live requests; limit: None takes the server's."""
        request = operator_pb2.ListRequestsRequest(limit=limit)
        reply: operator_pb2.ListRequestsResponse = await self._operator.ListRequests(request)
        return reply

    async def drain(self) -> operator_pb2.DrainResponse:
        """Has the server refuse new requests; returns at once, while live ones go on."""
        reply: operator_pb2.DrainResponse = await self._operator.Drain(operator_pb2.DrainRequest())
        return reply

    async def resume(self) -> operator_pb2.ResumeResponse:
        """Has a drained server take requests again."""
        reply: operator_pb2.ResumeResponse = await self._operator.Resume(operator_pb2.ResumeRequest())
        return reply

    async def reload(self) -> operator_pb2.ReloadResponse:
        """Has the server read its configuration again."""
        reply: operator_pb2.ReloadResponse = await self._operator.Reload(operator_pb2.ReloadRequest())
        return reply

    async def abort(self, request_ids: Sequence[str]) -> operator_pb2.AbortResponse:
        """Ends requests by id."""
        request = operator_pb2.AbortRequest(request_ids=request_ids)
        reply: operator_pb2.AbortResponse = await self._operator.Abort(request)
        return reply

    async def check_integrity(self) -> operator_pb2.CheckIntegrityResponse:
        request = operator_pb2.CheckIntegrityRequest()
        reply: operator_pb2.CheckIntegrityResponse = await self._operator.CheckIntegrity(request)
        return reply

    async def check_health(self, service: str) -> int:
        """A `HealthCheckResponse.ServingStatus` of a service; "" asks about the process."""
        reply = await self._health.Check(health_pb2.HealthCheckRequest(service=service))
        status: int = reply.status
        return status

    async def wait_ready(self, service: str, timeout_s: float) -> None:
        """Returns when a service reports SERVING. Raises AioRpcError, DEADLINE_EXCEEDED, when it does not in time."""
        request = health_pb2.HealthCheckRequest(service=service)
        watch = self._health.Watch(request, timeout=timeout_s, wait_for_ready=True)
        async for state in watch:
            if state.status == health_pb2.HealthCheckResponse.SERVING:
                watch.cancel()
                return

    async def _tokenize(self, request: inference_pb2.TokenizeRequest) -> list[int]:
        reply: inference_pb2.TokenizeResponse = await self._inference.Tokenize(request)
        return list(reply.token_ids)
