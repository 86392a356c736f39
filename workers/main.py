"""The process of one rank: `python -m workers.main`. Opens the service and ends with whoever started it.

Knows no model: the worker's class is imported when the runtime asks it to load, so that the address is known at once
and a failing import reaches the runtime like any other failure to load.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import logging
import os
import socket
from collections.abc import Sequence

from configs.schema import WorkerSettings
from workers.channel import LOOPBACK
from workers.plan import Progress
from workers.server import LoadWorker, WorkerLike, serve_worker

DEFAULT_FACTORY = "workers.step:Worker.load"


def factory_at(path: str) -> LoadWorker:
    """A loader that imports `module:name.of.callable` on its first use."""

    def load(settings: WorkerSettings, progress: Progress) -> WorkerLike:
        progress("import", 0, 1)
        module, _, names = path.partition(":")
        target: object = importlib.import_module(module)
        for name in names.split("."):
            target = getattr(target, name)
        assert callable(target), f"{path} is not callable"
        worker: WorkerLike = target(settings, progress)
        return worker

    return load


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until the other end of the lifeline closes, be it by intent or by the death of its holder."""
    parser = argparse.ArgumentParser(prog="python -m workers.main", description="One rank of a deployment.")
    parser.add_argument("--lifeline-fd", type=int, required=True, help="inherited socket: address out, end of life in")
    parser.add_argument("--epoch", type=int, required=True, help="which life of the rank this is")
    parser.add_argument("--bind-host", default=LOOPBACK, help="address to listen on")
    parser.add_argument("--advertise-host", help="address to tell the runtime; default: the bind host")
    parser.add_argument("--port-min", type=int, default=0, help="first port to try; 0 takes a free one")
    parser.add_argument("--port-max", type=int, default=0, help="last port to try")
    parser.add_argument("--factory", default=DEFAULT_FACTORY, help="module:callable that loads the worker")
    options = parser.parse_args(arguments)

    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _server, address = serve_worker(
        factory_at(options.factory),
        epoch=options.epoch,
        bind_host=options.bind_host,
        advertise_host=options.advertise_host,
        ports=range(options.port_min, options.port_max + 1),
    )
    with socket.socket(fileno=options.lifeline_fd) as lifeline:
        lifeline.sendall(f"{address}\n".encode())
        while lifeline.recv(1):
            pass
    # A step may be running; nothing it could still do is wanted.
    os._exit(0)


if __name__ == "__main__":
    main()
