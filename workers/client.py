"""The runtime's end of the link to one rank: load, execute, and notice at once when it breaks. Knows no launcher.

A link has one life. Once `lost` is set (a broken connection, a refused report, a step that failed in the rank or was
given up) every call raises, and the rank behind it is to be discarded. Deadlines are the business of whoever waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from configs.schema import WorkerSettings
from outrider.v1 import worker_pb2 as messages
from outrider.v1 import worker_pb2_grpc as services
from parallel.mesh import ONE_RANK, Mesh
from workers import wire
from workers.channel import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S, PLAIN, Security, make_async_channel
from workers.demands import MAX_PREPARING, Constraint
from workers.plan import Progress, RankReport, StepPlan, WorkerDescription, WorkerError, WorkerLost
from workers.sequence_wire import constraint_to_wire
from workers.terms import LinkTerms

Stream = grpc.aio.StreamStreamCall[bytes, messages.RankReport]

EXECUTE = "/" + messages.DESCRIPTOR.services_by_name["WorkerService"].full_name + "/Execute"

INTEGRITY_TIMEOUT_S = 60.0

PREPARE_TIMEOUT_S = KEEPALIVE_S + KEEPALIVE_TIMEOUT_S + 5.0
"""The link to a rank that stands still has broken by then: one that does not answer compiles."""

MAX_REMEMBERED = 256
"""Constraints that the rank is taken to have ready; it knows itself."""


class LinkBroken(WorkerLost):
    """The connection is gone, which says nothing of why."""


class WorkerClient:
    """Belongs to the event loop it was made in. Dials `address` (host:port) when it loads.

    terms: of the rank's life. security: what came of the certificates they name.

    lost: set, with the reason, when the link is no more; also while no step is in flight.
    """

    def __init__(self, address: str, terms: LinkTerms, security: Security = PLAIN) -> None:
        self.address = address
        self._metadata = terms.metadata
        self._has_tls = security.channel is not None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._channel = make_async_channel(address, security)
        self._stub = services.WorkerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        # Plans come encoded, once for all ranks of a group; the generated stub would encode them for each.
        self._open_stream = self._channel.stream_stream(
            EXECUTE, request_serializer=bytes, response_deserializer=messages.RankReport.FromString
        )
        self._place = (ONE_RANK, 0)
        self._stream: Stream | None = None
        self._watcher: asyncio.Task[None] | None = None
        # Two steps may be in flight. Locks are fair, so reports are read in the order in which plans were written.
        self._writing = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._preparing, self._touching = asyncio.Semaphore(MAX_PREPARING), asyncio.Semaphore(MAX_PREPARING)
        # What the rank had made ready when it was last asked, the oldest first.
        self._prepared: dict[Constraint, None] = {}

    async def load(self, settings: WorkerSettings, progress: Progress) -> WorkerDescription:
        """Has the rank load, reports its progress, and opens the stream of steps.

        Raises the rank's own error (LoadError, CollectiveFailed, or WorkerLost with its text), LinkBroken when it is
        gone on the way.
        """
        self._place = (Mesh.of(settings.parallel), settings.seat.rank)
        last = messages.LoadProgress()
        try:
            async for last in self._stub.Load(wire.settings_to_wire(settings), metadata=self._metadata):
                if last.stage:
                    progress(last.stage, last.done, last.total)
            if last.error:
                raise wire.error_from_text(last.error)
            description = wire.description_from_wire(last)
            self._stream = self._open_stream(None, metadata=self._metadata)
            await self._stream.initial_metadata()
        except grpc.aio.AioRpcError as error:
            hint = ""
            if self._has_tls and error.code() is grpc.StatusCode.UNAVAILABLE and not last.stage:
                hint = "; where that is about certificates, compare the files of cluster.tls here and on its machine"
            raise self._fail(LinkBroken(f"the link to {self.address} broke: {error.details()}{hint}")) from None
        except WorkerError as error:
            raise self._fail(error) from None
        self._watcher = asyncio.create_task(self._watch(self._stream))
        return description

    async def execute(self, plan: StepPlan, encoded: bytes) -> RankReport:
        """One step: its plan down, the rank's report up. Calls may overlap; reports come in the order of the calls.

        encoded: `plan` as `wire.encode_plan` gives it.

        Raises the rank's own error (StalePlan, CollectiveFailed, or WorkerLost with its text), StalePlan for the report
        of another step or epoch, WorkerLost for a malformed one, LinkBroken. All of them end the link, and so does a
        cancelled call.
        """
        if self.lost.done():
            raise LinkBroken(self.lost.result())
        assert self._stream is not None, "load comes first"
        try:
            async with self._writing:
                await self._stream.write(encoded)
            async with self._reading:
                reply = await self._stream.read()
            if not isinstance(reply, messages.RankReport):
                raise LinkBroken(f"the worker at {self.address} closed the stream of steps")
            return wire.report_from_wire(reply, plan, *self._place)
        except ValueError as error:
            raise self._fail(WorkerLost(f"the worker at {self.address} sent a malformed report: {error}")) from error
        except WorkerError as error:
            raise self._fail(error) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the call ended under us; the watcher learns why
            raise LinkBroken(await asyncio.shield(self.lost)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                self.abandon(f"step {plan.step_id} was given up")
                raise
            # gRPC says "cancelled" to whoever reads from a call that `abandon` has cancelled.
            raise LinkBroken(await asyncio.shield(self.lost)) from None

    async def check_integrity(self) -> list[str]:
        """The rank's broken invariants; empty when all hold. Raises WorkerLost when it cannot say."""
        try:
            reply = await self._ask(self._stub.CheckIntegrity, messages.CheckRankRequest(), INTEGRITY_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise WorkerLost(f"the link to {self.address} broke: {error.details()}") from None
        return list(reply.violations)

    async def prepare(self, constraint: Constraint) -> str:
        """Has the rank make a constraint ready, beside its steps. Returns why it cannot be followed, "" where it can.

        What it had made ready before does not wait behind what is compiled. Raises WorkerError when the rank still
        compiles what took too long before, WorkerLost when it cannot say. The link lives on.
        """
        request = messages.PrepareRequest(constraint=constraint_to_wire(constraint))
        was_ready = constraint in self._prepared
        try:
            async with self._touching if was_ready else self._preparing:
                reply = await self._ask(self._stub.Prepare, request, PREPARE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"it takes longer than {PREPARE_TIMEOUT_S:g} s to compile; make it smaller"
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                if was_ready:  # no more: it waits its turn
                    self._prepared.pop(constraint, None)
                    return await self.prepare(constraint)
                raise WorkerError(f"the worker at {self.address} is busy: {error.details()}") from None
            raise WorkerLost(f"the link to {self.address} broke: {error.details()}") from None
        if not reply.problem:
            self._prepared.pop(constraint, None)
            self._prepared[constraint] = None
            if len(self._prepared) > MAX_REMEMBERED:
                del self._prepared[next(iter(self._prepared))]
        return str(reply.problem)

    def abandon(self, reason: str) -> None:
        """Ends the link; steps in flight raise LinkBroken with the reason."""
        if not self.lost.done():
            self.lost.set_result(reason)
        if self._stream is not None:
            self._stream.cancel()

    async def close(self) -> None:
        """Ends the link and frees its connection."""
        self.abandon("the runtime closed the link")
        await self._channel.close(None)
        if self._watcher is not None:
            await self._watcher

    async def _ask(self, method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
        """A call beside the stream of steps. Raises AioRpcError, or LinkBroken when the link is no more."""
        if self.lost.done():
            raise LinkBroken(self.lost.result())
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except (asyncio.CancelledError, grpc.aio.UsageError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # `close` ended the channel under the call, which gRPC tells in either way.
            raise LinkBroken(f"the link to {self.address} was closed") from None

    def _fail(self, error: WorkerError) -> WorkerError:
        self.abandon(str(error))
        return error

    async def _watch(self, stream: Stream) -> None:
        """Links break between steps too, when nobody reads."""
        details = await stream.details()  # known when the call has ended, and not before
        self.abandon(f"the link to {self.address} broke: {details or 'the worker closed the stream of steps'}")
