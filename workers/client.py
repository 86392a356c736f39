"""The runtime's end of the link to one rank: load, execute, and notice at once when it breaks. Knows no launcher.

A link has one life. Once `lost` is set (a broken connection, a deadline passed, a refused result, a step that failed in
the worker) every call raises, and the worker behind it is to be discarded.
"""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from configs.schema import WorkerSettings
from outrider.v1 import worker_pb2 as messages
from outrider.v1 import worker_pb2_grpc as services
from workers import wire
from workers.channel import PLAIN, Security, make_async_channel
from workers.deadline import running_timeout
from workers.plan import Progress, StepPlan, StepResult, StepTimeout, WorkerDescription, WorkerError, WorkerLost

Stream = grpc.aio.StreamStreamCall[messages.StepPlan, messages.StepResult]


class WorkerClient:
    """Belongs to the event loop it was made in. Dials `address` (host:port) when it loads.

    lost: set, with the reason, when the link is no more; also while no step is in flight.
    """

    def __init__(self, address: str, *, step_timeout_s: float, security: Security = PLAIN) -> None:
        self.address = address
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._step_timeout_s = step_timeout_s
        self._channel = make_async_channel(address, security)
        self._stub = services.WorkerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._stream: Stream | None = None
        self._watcher: asyncio.Task[None] | None = None
        # Two steps may be in flight. Locks are fair, so results are read in the order in which plans were written.
        self._writing = asyncio.Lock()
        self._reading = asyncio.Lock()

    async def load(self, settings: WorkerSettings, progress: Progress) -> WorkerDescription:
        """Has the worker load, reports its progress, and opens the stream of steps.

        Raises LoadError with the worker's own text, WorkerLost when it dies on the way.
        """
        last = messages.LoadProgress()
        try:
            async for last in self._stub.Load(wire.settings_to_wire(settings)):
                if last.stage:
                    progress(last.stage, last.done, last.total)
            if last.error:
                raise wire.error_from_text(last.error)
            description = wire.description_from_wire(last)
            self._stream = self._stub.Execute()
            await self._stream.initial_metadata()
        except grpc.aio.AioRpcError as error:
            raise self._fail(WorkerLost(f"the link to {self.address} broke: {error.details()}")) from None
        except WorkerError as error:
            raise self._fail(error) from None
        self._watcher = asyncio.create_task(self._watch(self._stream))
        return description

    async def execute(self, plan: StepPlan) -> StepResult:
        """One step: its plan down, its result up. Calls may overlap; results come in the order of the calls.

        Raises StepTimeout when no result came within the step timeout (counted from the result before it, without the
        time in which this event loop stood still), StalePlan when worker or result speak of another step or epoch,
        WorkerLost for everything else. All of them end the link, and so does a cancelled call.
        """
        if self.lost.done():
            raise WorkerLost(self.lost.result())
        assert self._stream is not None, "load comes first"
        try:
            async with self._writing, running_timeout(self._step_timeout_s):
                await self._stream.write(wire.plan_to_wire(plan))
            async with self._reading, running_timeout(self._step_timeout_s):
                reply = await self._stream.read()
            if not isinstance(reply, messages.StepResult):
                raise WorkerLost(f"the worker at {self.address} closed the stream of steps")
            return wire.result_from_wire(reply, plan)
        except TimeoutError:
            text = f"step {plan.step_id} has no result after {self._step_timeout_s:g} s"
            raise self._fail(StepTimeout(text)) from None
        except ValueError as error:
            raise self._fail(WorkerLost(f"the worker at {self.address} sent a malformed result: {error}")) from error
        except WorkerError as error:
            raise self._fail(error) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the call ended under us; the watcher learns why
            raise WorkerLost(await asyncio.shield(self.lost)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                self.abandon(f"step {plan.step_id} was given up")
                raise
            # gRPC says "cancelled" to whoever reads from a call that `abandon` has cancelled.
            raise WorkerLost(await asyncio.shield(self.lost)) from None

    async def check_integrity(self) -> list[str]:
        """The worker's broken invariants; empty when all hold. Raises WorkerLost when it cannot say."""
        try:
            reply = await self._stub.CheckIntegrity(messages.CheckIntegrityRequest(), timeout=self._step_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise WorkerLost(f"the link to {self.address} broke: {error.details()}") from None
        return list(reply.violations)

    def abandon(self, reason: str) -> None:
        """Ends the link; steps in flight raise WorkerLost with the reason."""
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

    def _fail(self, error: WorkerError) -> WorkerError:
        self.abandon(str(error))
        return error

    async def _watch(self, stream: Stream) -> None:
        """Links break between steps too, when nobody reads."""
        details = await stream.details()  # known when the call has ended, and not before
        self.abandon(f"the link to {self.address} broke: {details or 'the worker closed the stream of steps'}")
