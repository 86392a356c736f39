"""grpc.health.v1 over the engine's state: Check, and a Watch that follows it. Knows no requests.

service                        SERVING while
""                             the process answers (liveness)
outrider.v1.InferenceService   the engine takes requests and the server is not stopping (readiness)
outrider.v1.OperatorService    the server is not stopping
"""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import OVERALL_HEALTH, aio  # type: ignore[attr-defined]

from runtime.front.engine_link import EngineLink

INFERENCE = "outrider.v1.InferenceService"
OPERATOR = "outrider.v1.OperatorService"


class Health:
    """Keeps the health service true to the engine."""

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine
        self._servicer = aio.HealthServicer()
        self._is_draining = False
        self._updates: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    async def start(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server that is not yet started, and follows the engine from now on."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]
        await self._servicer.set(OVERALL_HEALTH, health_pb2.HealthCheckResponse.SERVING)
        await self._update()
        self._engine.add_state_listener(self._on_change)

    async def drain(self) -> None:
        """Tells watchers and probes that the server is stopping. The process itself stays live."""
        self._is_draining = True
        await self._update()

    def _on_change(self, is_serving: bool) -> None:
        update = asyncio.get_running_loop().create_task(self._update())
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)

    async def _update(self) -> None:
        # One at a time, and the state is read here and not taken from the listener: setting it waits for watchers that
        # are being written to, and an update that waited longer must not bring an old state back.
        async with self._turn:
            for service, is_up in ((INFERENCE, self._engine.is_serving), (OPERATOR, True)):
                serving = is_up and not self._is_draining
                status = (
                    health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
                )
                await self._servicer.set(service, status)
