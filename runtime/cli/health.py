"""`outrider health`: one question to grpc.health.v1, answered by the exit code; for probes of containers."""

from __future__ import annotations

from typing import Annotated

import typer

from runtime.cli.console import DEFAULT_ADDRESS, EXIT_NO, OUT, run
from runtime.cli.options import Address


def health(
    address: Address = DEFAULT_ADDRESS,
    service: Annotated[str, typer.Option(help="Service to ask about; empty asks about the process.")] = "",
    timeout_s: Annotated[float, typer.Option(min=0, help="Longest wait for the answer.")] = 5.0,
) -> None:
    """Ask a server whether it serves; exit code 0 if so."""
    run(_health(address, service, timeout_s))


async def _health(address: str, service: str, timeout_s: float) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from runtime.front.client import OutriderClient

    async with OutriderClient(address) as client:
        request = health_pb2.HealthCheckRequest(service=service)
        stub = health_pb2_grpc.HealthStub(client.channel)  # type: ignore[no-untyped-call]
        reply = await stub.Check(request, timeout=timeout_s)
    OUT.print(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise typer.Exit(EXIT_NO)
