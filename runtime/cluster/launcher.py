"""What it means to start a rank, whoever does it, and the environment a rank starts in. Knows no Ray and no gRPC."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from configs.schema import WorkerSettings
from workers.opening import StoreSeat
from workers.plan import WorkerLost
from workers.terms import LinkTerms

KILL_TIMEOUT_S = 10.0
"""A killed process that has not gone by then will not go: the machine is ill."""

LOG_TAIL_BYTES = 2000

LOG_TIMEOUT_S = 10.0
"""Longest wait for a log on another machine."""

LOGS_KEPT = 50
"""Logs of a rank's earlier lives that stay in a state directory."""

_SOURCE_ROOTS_OF = ("workers", "outrider")


class RankDied(WorkerLost):
    """The process of a rank is gone."""


class LaunchedWorker(Protocol):
    """One process of a rank, serving but not loaded."""

    address: str
    """host:port of its service."""
    host: str
    """An address of its machine, for its end of collectives."""
    store: StoreSeat | None
    """Where the group's store is to be; of rank 0 in a group of several."""
    pid: int
    """On its own machine."""
    name: str
    """For logs and errors."""

    async def wait_dead(self) -> str:
        """Returns when the process is gone, with what is known of the reason. May be awaited any number of times."""
        ...

    async def kill(self) -> None:
        """Returns when the process is gone. Raises WorkerError when it is not after KILL_TIMEOUT_S."""
        ...

    async def last_words(self) -> str:
        """The end of what it printed and where the whole is, as a clause to add to an error; empty where there is none.
        Takes LOG_TIMEOUT_S at most."""
        ...


class Launcher(Protocol):
    """Starts ranks, any number at a time. `settings.seat` says which one."""

    async def launch(self, settings: WorkerSettings, epoch: int, terms: LinkTerms) -> LaunchedWorker:
        """Hands the terms over by a way that only the rank sees. Leaves nothing behind when cancelled.

        Raises RankDied when the process dies before it serves, WorkerLost when there is none to be had."""
        ...

    async def close(self) -> None:
        """Lets go of what all ranks share; the ranks are dead by then."""
        ...


def worker_environment(settings: WorkerSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables a rank needs before it imports anything numerical, and the path on which it finds our packages.

    Thread counts are read once, when the libraries load. MKL_CBWR keeps MKL to one code path whatever the alignment of
    its inputs, which reference numerics rest on; an operator's own choice stands.
    """
    threads = str(settings.threads)
    path = [*source_roots(), *filter(None, [inherited.get("PYTHONPATH")])]
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    if settings.model.numerics == "reference":
        variables["MKL_CBWR"] = inherited.get("MKL_CBWR", "COMPATIBLE")
    if path:
        variables["PYTHONPATH"] = os.pathsep.join(path)
    return variables


def source_roots() -> list[str]:
    """Folders of our packages that a fresh interpreter would not search: those of a checkout; none once installed."""
    roots: list[str] = []
    for package in _SOURCE_ROOTS_OF:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        root = Path(next(iter(spec.submodule_search_locations))).parent
        if root.name not in ("site-packages", "dist-packages") and str(root) not in roots:
            roots.append(str(root))
    return roots


def keeps_store(settings: WorkerSettings) -> bool:
    """Whether the rank is the one where the ranks of its group meet."""
    return settings.seat.rank == 0 and settings.parallel.dp * settings.parallel.tp > 1


def log_path(state_dir: Path, settings: WorkerSettings, epoch: int) -> Path:
    """Where a rank of this machine logs: a file that is new. Makes the folder and keeps it from filling up.

    The name tells when and for which runtime: several may share the folder, and one in a container always has the same
    number. Names sort by age. Of a rank's older logs the last LOGS_KEPT stay.
    """
    rank = settings.seat.rank
    folder = state_dir.absolute() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.glob(f"worker-*-rank{rank}-epoch*.log"))[:-LOGS_KEPT]:
        old.unlink(missing_ok=True)
    began = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    return folder / f"worker-{began}Z-runtime{os.getpid()}-rank{rank}-epoch{epoch}.log"


def read_tail(path: Path) -> bytes:
    """The end of a log of this machine, at most LOG_TAIL_BYTES of it; empty when there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return log.read()
    except FileNotFoundError:
        return b""


def last_words(tail: bytes, where: str) -> str:
    """The end of a log as a clause. `where`: its path, with its machine where that is another."""
    text = tail.decode(errors="replace").strip()
    return f"; its log ends:\n{text}\n({where})" if text else f"; its log, {where}, is empty"
