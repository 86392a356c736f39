"""`outrider health`: one question to grpc.health.v1, answered by the exit code; for probes of containers."""

from __future__ import annotations

from typing import Annotated

import typer

from runtime.cli.console import EXIT_NO, run
from runtime.cli.options import DEFAULT_TIMEOUT_S, Addresses, Timeout
from runtime.cli.replicas import answers_of, ask_once, finish, print_failures, print_lines


def health(
    addresses: Addresses,
    service: Annotated[str, typer.Option(help="Service to ask about; empty asks about the process.")] = "",
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Ask servers whether a service serves; exit code 0 if so, 1 where one does not.

    Without --service: whether the process lives. outrider.v1.InferenceService: whether it takes requests.
    """
    run(_health(addresses, service, timeout_s))


async def _health(addresses: list[str], service: str, timeout_s: float) -> None:
    from grpc_health.v1 import health_pb2

    serving = health_pb2.HealthCheckResponse.SERVING
    outcomes = await ask_once(addresses, timeout_s, lambda client: client.check_health(service))
    print_lines(outcomes, health_pb2.HealthCheckResponse.ServingStatus.Name)
    is_down = any(answer.value != serving for answer in answers_of(outcomes))
    finish(print_failures(outcomes), EXIT_NO if is_down else 0)
