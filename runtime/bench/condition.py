"""Whether a server can be measured now, by its status; waits while its ranks are started anew. Knows no cell."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from runtime.bench.completion import Clock
from runtime.bench.errors import BenchError

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2
    from runtime.front.client import OutriderClient

RECOVERY_S = 120.0
"""Longest wait for ranks that are started anew."""
POLL_S = 0.2


def check_serving(status: operator_pb2.GetStatusResponse) -> None:
    """Raises BenchError where the server refuses requests, for whatever reason."""
    from outrider.v1 import operator_pb2

    check_lasting(status)
    if status.state != operator_pb2.SERVER_STATE_SERVING:
        raise BenchError(
            f"the server is {_name(status)}: {status.outage or 'it refuses requests'}; wait until it serves"
        )


def check_lasting(status: operator_pb2.GetStatusResponse) -> None:
    """Raises BenchError where the server refuses requests and will not take them again by itself."""
    from outrider.v1 import operator_pb2

    if status.state == operator_pb2.SERVER_STATE_DRAINING:
        raise BenchError("the server is draining and refuses requests; have it resume, or measure another")
    if status.state == operator_pb2.SERVER_STATE_STOPPING:
        raise BenchError("the server is stopping; measure another")


def is_unbroken(status: operator_pb2.GetStatusResponse, epoch: int) -> bool:
    """Whether the server serves, and its ranks are those of `epoch`. Raises BenchError as `check_lasting`."""
    from outrider.v1 import operator_pb2

    check_lasting(status)
    return status.state == operator_pb2.SERVER_STATE_SERVING and status.epoch == epoch


async def when_serving(client: OutriderClient, clock: Clock) -> operator_pb2.GetStatusResponse:
    """The status of a server that serves. Raises BenchError as `check_lasting`, and where its ranks do not come back in
    RECOVERY_S; AioRpcError where it does not answer."""
    from outrider.v1 import operator_pb2

    until_s = clock() + RECOVERY_S
    while True:
        status = await client.get_status()
        check_lasting(status)
        if status.state == operator_pb2.SERVER_STATE_SERVING:
            return status
        if clock() > until_s:
            raise BenchError(
                f"the server is {_name(status)} ({status.outage}) and did not serve again in {RECOVERY_S:g} s; "
                "see its log"
            )
        await asyncio.sleep(POLL_S)


def _name(status: operator_pb2.GetStatusResponse) -> str:
    from outrider.v1 import operator_pb2

    return operator_pb2.ServerState.Name(status.state).removeprefix("SERVER_STATE_").lower()
