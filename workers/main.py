"""The process of one rank: `python -m workers.main`. Opens the service and ends with whoever started it.

Knows no model: the worker's class is imported when the runtime asks it to load, so that the address is known at once
and a failing import reaches the runtime like any other failure to load.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict

from configs.access import WorkerTlsSettings
from configs.schema import WorkerSettings
from workers.certificates import CertificateProblem
from workers.channel import LOOPBACK
from workers.opening import OpenedRank, StoreSeat, open_rank
from workers.plan import Progress
from workers.server import LoadWorker, WorkerLike
from workers.terms import LinkTerms

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


def terms_to_line(terms: LinkTerms) -> bytes:
    """What comes in on the lifeline: not as arguments or environment, which others on the machine can list."""
    return json.dumps({"secret": terms.secret, "tls": terms.tls.model_dump(mode="json")}).encode() + b"\n"


def terms_from_line(line: bytes) -> LinkTerms:
    fields = json.loads(line)
    return LinkTerms(secret=fields["secret"], tls=WorkerTlsSettings.model_validate(fields["tls"]))


def opened_to_line(opened: OpenedRank) -> bytes:
    """What goes out on the lifeline."""
    return json.dumps(asdict(opened)).encode() + b"\n"


def opened_from_line(line: bytes) -> OpenedRank:
    fields = json.loads(line)
    store = fields.pop("store")
    return OpenedRank(**fields, store=StoreSeat(**store) if store else None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until the other end of the lifeline closes, be it by intent or by the death of its holder."""
    parser = argparse.ArgumentParser(prog="python -m workers.main", description="One rank of a deployment.")
    parser.add_argument(
        "--lifeline-fd", type=int, required=True, help="inherited socket: terms and end of life in, addresses out"
    )
    parser.add_argument("--epoch", type=int, required=True, help="which life of the rank this is")
    parser.add_argument("--bind-host", default=LOOPBACK, help="address to listen on")
    parser.add_argument("--advertise-host", help="address to tell the runtime; default: the bind host")
    parser.add_argument("--port-min", type=int, default=0, help="first port to try; 0 takes a free one")
    parser.add_argument("--port-max", type=int, default=0, help="last port to try")
    parser.add_argument("--keeps-store", action="store_true", help="listen for the store of a group of ranks too")
    parser.add_argument("--factory", default=DEFAULT_FACTORY, help="module:callable that loads the worker")
    options = parser.parse_args(arguments)

    _die_with_parent()
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    lifeline = socket.socket(fileno=options.lifeline_fd)
    try:
        _server, opened = open_rank(
            factory_at(options.factory),
            epoch=options.epoch,
            terms=terms_from_line(lifeline.makefile("rb").readline()),
            bind_host=options.bind_host,
            advertise_host=options.advertise_host,
            own_host=LOOPBACK,
            ports=(options.port_min, options.port_max),
            keeps_store=options.keeps_store,
        )
    except (OSError, CertificateProblem) as error:  # for the reader of a log: what it says is all there is to know
        sys.exit(str(error))
    with lifeline:
        lifeline.sendall(opened_to_line(opened))
        while lifeline.recv(1):
            pass
    # A step may be running; nothing it could still do is wanted.
    os._exit(0)


def _die_with_parent() -> None:
    """A process that is stopped does not hear that its lifeline closes; the kernel's signal ends it all the same."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
