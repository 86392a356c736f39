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
from typing import Any

import grpc

from workers.main import factory_at
from workers.opening import OpenedRank, open_rank
from workers.terms import LinkTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedActor:
    """Where an actor serves, which process it is on which Ray node, and where it logs there."""

    opened: OpenedRank
    pid: int
    node_id: str
    log: Path


class WorkerActor:
    """`open` once, then `stay` for as long as the rank is wanted: that call ends with the actor and tells its death."""

    def __init__(self) -> None:
        self._server: grpc.Server | None = None

    def open(
        self,
        *,
        factory: str,
        epoch: int,
        terms: LinkTerms,
        bind_host: str | None,
        advertise_host: str | None,
        ports: tuple[int, int],
        keeps_store: bool,
        log_path: Path,
    ) -> OpenedActor:
        """Starts the service. `bind_host` None takes the Ray node's address; `ports` are the first and last to try.

        `log_path` receives standard output and error; a relative one is in the folder of Ray's logs on this node, where
        `ray logs` finds it.
        """
        from ray import get_runtime_context
        from ray.util import get_node_ip_address

        if not log_path.is_absolute():
            log_path = ray_log_folder() / log_path
        _redirect_output(log_path)
        faulthandler.enable()
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
        own_host: str = get_node_ip_address()  # type: ignore[no-untyped-call]
        self._server, opened = open_rank(
            factory_at(factory),
            epoch=epoch,
            terms=terms,
            bind_host=bind_host or own_host,
            advertise_host=advertise_host,
            own_host=own_host,
            ports=ports,
            keeps_store=keeps_store,
        )
        return OpenedActor(opened=opened, pid=os.getpid(), node_id=get_runtime_context().get_node_id(), log=log_path)

    def stay(self) -> None:
        """Never returns."""
        threading.Event().wait()


def ray_log_folder() -> Path:
    from ray._private import worker

    node: Any = worker._global_node
    return Path(node.get_logs_dir_path())


def _redirect_output(path: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
