"""grpc.health.v1 over the engine's state: Check, List, and a Watch that tells every change. Knows no requests.

service                                        SERVING while
""                                             the process answers, and its engine has not ended for good (liveness)
outrider.v1.InferenceService, other faces      the engine is a good place to send requests to (readiness)
outrider.v1.OperatorService                    there is an engine, up to the end of the last stream

Readiness goes with every loss of ranks, every drain and stop, and every step that takes too long; liveness with none of
these.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import OVERALL_HEALTH

from runtime.front.engine_link import EngineLink
from runtime.front.status import Context

INFERENCE = "outrider.v1.InferenceService"
OPERATOR = "outrider.v1.OperatorService"

MAX_UNTOLD = 64
"""Changes that wait for a watcher who reads slowly; past this the oldest are let go, and the newest is always told."""

Status = health_pb2.HealthCheckResponse.ServingStatus
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """Keeps the health service true to the engine, once there is one; on every port alike.

    faces: full names of the services that take requests.
    """

    def __init__(self, faces: Sequence[str] = (INFERENCE,)) -> None:
        self._faces = tuple(faces)
        self._engine: EngineLink | None = None
        self._is_draining = False
        self._is_ending = False
        self._servicer = HealthServicer()
        self._update()

    @property
    def is_ready(self) -> bool:
        """What is told of the services that take requests."""
        return self._engine is not None and self._engine.is_serving and not self._is_draining

    def start(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server that is not yet started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]

    def follow(self, engine: EngineLink) -> None:
        """Tells of an engine from now on."""
        self._engine = engine
        engine.add_state_listener(lambda is_serving: self._update())
        self._update()

    def drain(self) -> None:
        """Requests are to go elsewhere from now on; operators may still call."""
        self._is_draining = True
        self._update()

    def end(self) -> None:
        """Nothing is served from now on. The process itself stays live."""
        self._is_draining = self._is_ending = True
        self._update()

    def _update(self) -> None:
        engine = self._engine
        self._servicer.tell(OVERALL_HEALTH, engine is None or not engine.has_ended)
        for face in self._faces:
            self._servicer.tell(face, self.is_ready)
        self._servicer.tell(OPERATOR, engine is not None and not self._is_ending)


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Answers for what it was told of, on one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, Status] = {}
        self._watches: dict[str, set[_Untold]] = {}

    def tell(self, service: str, is_serving: bool) -> None:
        """Watchers hear of it where it is a change."""
        status = _SERVING if is_serving else _NOT_SERVING
        if self._statuses.get(service) != status:
            self._statuses[service] = status
            for untold in self._watches.get(service, ()):
                untold.add(status)

    async def Check(self, message: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(message.service)
        if status is None:
            known = ", ".join(name for name in self._statuses if name)
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no such service; those served are {known}")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, message: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, message: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Writes for as long as the client listens and the server runs."""
        with self._watching(message.service) as untold:
            while True:
                await context.write(health_pb2.HealthCheckResponse(status=await untold.take()))

    @contextmanager
    def _watching(self, service: str) -> Iterator[_Untold]:
        untold = _Untold()
        untold.add(self._statuses.get(service, _UNKNOWN))
        self._watches.setdefault(service, set()).add(untold)
        try:
            yield untold
        finally:
            self._watches[service].discard(untold)
            if not self._watches[service]:
                del self._watches[service]


class _Untold:
    """What a watcher has not been told yet, oldest first."""

    def __init__(self) -> None:
        self._statuses: deque[Status] = deque(maxlen=MAX_UNTOLD)
        self._bell = asyncio.Event()

    def add(self, status: Status) -> None:
        self._statuses.append(status)
        self._bell.set()

    async def take(self) -> Status:
        """The oldest; waits until there is one."""
        while not self._statuses:
            self._bell.clear()
            await self._bell.wait()
        return self._statuses.popleft()
