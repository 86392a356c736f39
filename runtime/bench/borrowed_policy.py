"""The policy of a server for as long as it is measured: switched by compare and set, put back at the end. Knows no cell
and no load."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from runtime.bench.errors import BenchError, PolicyRefused
from runtime.bench.load import Policy

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2
    from runtime.front.client import OutriderClient

PUT_BACK_S = 10.0
"""How long a server may take to answer for a change of policy once we want to end."""
UNFINISHED = "the command ended before the server had answered"


class BorrowedPolicy:
    """Ours to switch as long as nobody else does; then it is theirs, and stays as they set it.

    left: why the policy of before is not in force again; empty where it is, or is not ours to put back.
    """

    def __init__(self, client: OutriderClient) -> None:
        self.left = ""
        self._client = client
        self._before: operator_pb2.VerificationPolicyState | None = None
        self._revision = 0
        self._asked_for: Policy | None = None
        """Of a switch that has not been answered."""
        self._is_theirs = False

    async def borrow(self) -> None:
        """Notes the policy in force. Raises AioRpcError."""
        self._before = await self._client.get_policy()
        self._revision = self._before.revision

    async def switch(self, policy: Policy) -> None:
        """Raises BenchError where the policy in force is not the one we left, PolicyRefused where the server lacks
        something for the new one, and AioRpcError."""
        import grpc.aio

        self._asked_for = policy
        switching = asyncio.ensure_future(
            self._client.switch_policy(message_of(policy), expected_revision=self._revision)
        )
        try:
            state = await asyncio.shield(switching)
        except asyncio.CancelledError:
            # The server switches all the same, and its answer tells the revision that is put back from.
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                async with asyncio.timeout(PUT_BACK_S):
                    self._note((await switching).revision)
            raise
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.ABORTED:
                raise self._theirs() from None
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                self._asked_for = None
                raise PolicyRefused(f"--policy {policy}: the server refuses it: {error.details()}") from None
            raise
        self._note(state.revision)

    def check(self, state: operator_pb2.VerificationPolicyState) -> None:
        """Raises BenchError where it is not the one that we set."""
        if state.revision != self._revision:
            raise self._theirs()

    async def put_back(self) -> None:
        """Puts the policy of before in force, unless it is, or somebody else has set another. Of its task, one
        cancellation does not end it, before it or in it; a second one does. Never raises on account of the server:
        `left` tells."""
        is_ours = self._before is not None and not self._is_theirs
        if not is_ours or (self._asked_for is None and self._before_holds()):
            return
        self.left = UNFINISHED
        if _num_cancellations() > 1:
            return
        putting = asyncio.create_task(self._put_back())
        try:
            await (putting if _num_cancellations() else asyncio.shield(putting))
        except asyncio.CancelledError:
            await putting
            raise

    async def _put_back(self) -> None:
        import grpc.aio

        assert self._before is not None, "nothing was borrowed"
        try:
            async with asyncio.timeout(PUT_BACK_S):
                if self._asked_for is not None:
                    await self._learn(self._asked_for)
                if not (self._is_theirs or self._before_holds()):
                    await self._client.switch_policy(self._before.policy, expected_revision=self._revision)
        except TimeoutError:
            self.left = f"the server did not answer in {PUT_BACK_S:g} s"
        except grpc.aio.AioRpcError as error:
            self.left = f"{error.code().name}: {error.details()}"
        else:
            self.left = ""

    async def _learn(self, policy: Policy) -> None:
        """What came of a switch that was not answered: nothing, ours, or somebody else's."""
        state = await self._client.get_policy()
        if state.revision == self._revision + 1 and _is(state.policy, message_of(policy)):
            self._note(state.revision)
        elif state.revision != self._revision:
            self._theirs()

    def _note(self, revision: int) -> None:
        self._revision, self._asked_for = revision, None

    def _before_holds(self) -> bool:
        return self._before is not None and self._revision == self._before.revision

    def _theirs(self) -> BenchError:
        self._is_theirs = True
        return BenchError(
            "somebody else changed the server's policy meanwhile: the cell is not counted, and the policy stays as "
            "they set it; measure again when they are done"
        )


def message_of(policy: Policy) -> operator_pb2.VerificationPolicy:
    """The policy as it is asked for. Bounds that are left to the server are absent."""
    from outrider.v1 import operator_pb2

    message = operator_pb2.VerificationPolicy()
    if policy.dynamic is not None:
        bounds = policy.dynamic
        message.dynamic.CopyFrom(
            operator_pb2.VerificationPolicy.Dynamic(
                gamma_min=bounds.gamma_min, gamma_max=bounds.gamma_max, itl_limit_ms=bounds.itl_limit_ms
            )
        )
    elif policy.gamma is None:
        message.off.SetInParent()
    else:
        message.fixed.gamma = policy.gamma
    return message


def _is(found: operator_pb2.VerificationPolicy, asked: operator_pb2.VerificationPolicy) -> bool:
    """Whether a policy in force can be what came of `asked`: the server names the bounds that were left to it."""
    if not (found.HasField("dynamic") and asked.HasField("dynamic")):
        return found == asked
    return all(getattr(found.dynamic, field.name) == value for field, value in asked.dynamic.ListFields())


def _num_cancellations() -> int:
    """Of the task that runs."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
