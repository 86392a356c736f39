"""The Ray actor of one rank: the service of `workers.main`, in a process that Ray starts. No Ray call carries steps.

A plain class; the launcher turns it into an actor, so that nothing here imports Ray before it runs inside one.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from workers.main import factory_at
from workers.server import serve_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorAddress:
    """Where an actor serves, and which process it is on which Ray node."""

    address: str
    pid: int
    node_id: str


class WorkerActor:
    """`open` once, then `stay` for as long as the rank is wanted: that call ends with the actor and tells its death."""

    def __init__(self) -> None:
        self._server: grpc.Server | None = None

    def open(
        self,
        *,
        factory: str,
        epoch: int,
        bind_host: str | None,
        advertise_host: str | None,
        ports: tuple[int, int],
        log_path: Path | None,
    ) -> ActorAddress:
        """Starts the service. `bind_host` None takes the Ray node's address; `log_path` receives standard output and
        error (None leaves them to Ray); `ports` are the first and the last to try."""
        from ray import get_runtime_context
        from ray.util import get_node_ip_address

        if log_path is not None:
            _redirect_output(log_path)
        faulthandler.enable()
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
        self._server, address = serve_worker(
            factory_at(factory),
            epoch=epoch,
            bind_host=bind_host or get_node_ip_address(),  # type: ignore[no-untyped-call]
            advertise_host=advertise_host,
            ports=range(ports[0], ports[1] + 1),
        )
        return ActorAddress(address=address, pid=os.getpid(), node_id=get_runtime_context().get_node_id())

    def stay(self) -> None:
        """Never returns."""
        threading.Event().wait()


def _redirect_output(path: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
