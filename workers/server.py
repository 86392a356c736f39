"""The gRPC service of one rank, around any object that executes plans. Knows no model, no torch and no launcher.

The life of a worker: Load once, Execute once, then the process ends. Whatever goes wrong makes the worker unusable for
good, and every later call is told why; the runtime then starts another.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import NoReturn, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from configs.schema import WorkerSettings
from outrider.v1 import worker_pb2 as messages
from outrider.v1 import worker_pb2_grpc as services
from parallel.mesh import ONE_RANK, Mesh
from workers import wire
from workers.address import join_address
from workers.channel import PLAIN, Security, bind, make_server
from workers.demands import MAX_PREPARING, Constraint
from workers.plan import Progress, RankReport, StalePlan, StepPlan, WorkerDescription, WorkerLost
from workers.sequence_wire import constraint_from_wire
from workers.terms import Gate

log = logging.getLogger(__name__)

SERVICE_NAME = "outrider.v1.WorkerService"

COMPILER_WAIT_S = 1.0
"""How long a constraint waits for those that nobody waits for any more; longer would keep health checks waiting."""


class WorkerLike(Protocol):
    """What the service needs of a rank."""

    @property
    def description(self) -> WorkerDescription: ...

    def execute(self, plan: StepPlan) -> RankReport:
        """Raises StalePlan, CollectiveFailed; after any exception the worker is unusable."""
        ...

    def check_integrity(self) -> list[str]:
        """One line per broken invariant; called between steps."""
        ...

    def is_ready(self, constraint: Constraint) -> bool:
        """Whether `prepare` has nothing to compile for it; called beside steps."""
        ...

    def prepare(self, constraint: Constraint) -> str:
        """Makes a constraint ready; called beside steps, from several threads. Returns why it cannot be followed, ""
        where it can."""
        ...


LoadWorker = Callable[[WorkerSettings, Progress], WorkerLike]
"""Raises LoadError when the checkpoint or the settings cannot be served."""


class WorkerServicer(services.WorkerServiceServicer):
    """Steps run in the thread that reads the stream: no hand-over between a plan's arrival and its execution.

    After a step that failed the stream goes on until the runtime hangs up, and every plan is answered by an error: a
    stream closed at once may overtake the reason.

    epoch: the life this worker was started for; plans of another are refused.
    """

    def __init__(self, load: LoadWorker, epoch: int) -> None:
        self._load = load
        self._epoch = epoch
        self._worker: WorkerLike | None = None
        self._place = (ONE_RANK, 0)
        self._unusable: str | None = None
        self._load_begun = threading.Event()
        self._stream_begun = threading.Event()
        self._claiming = threading.Lock()
        self._computing = threading.Lock()  # a step and an integrity check never overlap
        self._preparing = threading.BoundedSemaphore(MAX_PREPARING)
        self.health = health.HealthServicer()
        self.health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.NOT_SERVING)

    def Load(self, request: messages.LoadRequest, context: grpc.ServicerContext) -> Iterator[messages.LoadProgress]:
        self._claim(self._load_begun, "a worker loads once", context)
        frames: SimpleQueue[messages.LoadProgress | None] = SimpleQueue()
        # Progress must leave while loading goes on, so the loading gets a thread of its own.
        threading.Thread(target=self._load_into, args=(request, frames), name="load", daemon=True).start()
        yield from iter(frames.get, None)

    def _load_into(self, request: messages.LoadRequest, frames: SimpleQueue[messages.LoadProgress | None]) -> None:
        def progress(stage: str, done: int, total: int) -> None:
            frames.put(messages.LoadProgress(stage=stage, done=done, total=total))

        try:
            settings = wire.settings_from_wire(request)
            self._place = (Mesh.of(settings.parallel), settings.seat.rank)
            worker = self._load(settings, progress)
            last = wire.description_to_wire(worker.description)
        except Exception as error:
            log.exception("loading failed")
            self._become_unusable(wire.error_to_text(error))
            last = messages.LoadProgress(error=wire.error_to_text(error))
        else:
            self._worker = worker
            self.health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        frames.put(last)
        frames.put(None)

    def Execute(
        self, request_iterator: Iterator[messages.StepPlan], context: grpc.ServicerContext
    ) -> Iterator[messages.RankReport]:
        worker = self._loaded(context)
        self._claim(self._stream_begun, "a worker serves one stream, for its whole life", context)
        context.send_initial_metadata(())  # tells the runtime that the stream stands before the first step
        for message in request_iterator:
            plan = wire.plan_from_wire(message)
            try:
                reply = self._execute(worker, plan)
            except Exception as error:
                log.exception("step %d failed", plan.step_id)
                self._become_unusable(wire.error_to_text(error))
                reply = wire.failure_to_wire(error, plan)
            yield reply

    def _execute(self, worker: WorkerLike, plan: StepPlan) -> messages.RankReport:
        if self._unusable is not None:
            raise WorkerLost(f"the worker is unusable: {self._unusable}")
        if plan.epoch != self._epoch:
            raise StalePlan(f"a plan of epoch {plan.epoch} reached the worker of epoch {self._epoch}")
        with self._computing:
            return wire.report_to_wire(worker.execute(plan), plan, *self._place)

    def CheckIntegrity(
        self, request: messages.CheckRankRequest, context: grpc.ServicerContext
    ) -> messages.CheckRankResponse:
        worker = self._loaded(context)
        with self._computing:
            return messages.CheckRankResponse(violations=worker.check_integrity())

    def Prepare(self, request: messages.PrepareRequest, context: grpc.ServicerContext) -> messages.PrepareResponse:
        worker = self._loaded(context)
        constraint = constraint_from_wire(request.constraint)
        if worker.is_ready(constraint):
            return messages.PrepareResponse(problem=worker.prepare(constraint))
        if not self._preparing.acquire(timeout=COMPILER_WAIT_S):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_PREPARING} other constraints are being compiled")
        try:
            return messages.PrepareResponse(problem=worker.prepare(constraint))
        except Exception as error:  # what it fails on is the caller's own; the rank is as good as before
            log.exception("a constraint could not be prepared")
            return messages.PrepareResponse(problem=f"it cannot be compiled: {wire.error_to_text(error)}")
        finally:
            self._preparing.release()

    def _loaded(self, context: grpc.ServicerContext) -> WorkerLike:
        if self._unusable is not None:
            _refuse(context, f"the worker is unusable: {self._unusable}")
        if self._worker is None:
            _refuse(context, "the worker is not loaded")
        return self._worker

    def _claim(self, begun: threading.Event, rule: str, context: grpc.ServicerContext) -> None:
        with self._claiming:
            if not begun.is_set():
                begun.set()
                return
        _refuse(context, rule)

    def _become_unusable(self, reason: str) -> None:
        self._unusable = reason
        self.health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.NOT_SERVING)


def _refuse(context: grpc.ServicerContext, reason: str) -> NoReturn:
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
    raise AssertionError("abort raises")


NUM_THREADS = 4 + 3 * MAX_PREPARING
"""One each for Execute, Load, CheckIntegrity, a health check, constraints that are compiled, as many that wait and as
many that are ready; watches of health queue behind them."""


def serve_worker(
    load: LoadWorker,
    *,
    epoch: int,
    secret: str,
    bind_host: str,
    advertise_host: str | None,
    ports: range,
    security: Security = PLAIN,
) -> tuple[grpc.Server, str]:
    """Starts the service, for those who know `secret`; returns the server and the address to dial.

    Raises OSError when no port is free.
    """
    server = make_server(NUM_THREADS, [Gate(secret)])
    servicer = WorkerServicer(load, epoch)
    services.add_WorkerServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)  # type: ignore[no-untyped-call]
    port = bind(server, bind_host, ports, security)
    server.start()
    return server, join_address(advertise_host or bind_host, port)
