"""What it means to start a rank, whoever does it, and the environment a rank starts in. Knows no Ray and no gRPC."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from configs.schema import WorkerSettings

KILL_TIMEOUT_S = 10.0
"""A killed process that has not gone by then will not go: the machine is ill."""

LOG_TAIL_BYTES = 2000

LOGS_KEPT = 50
"""Logs of earlier ranks that stay in a state directory."""

_SOURCE_ROOTS_OF = ("workers", "outrider")


class LaunchedWorker(Protocol):
    """One process of a rank, serving but not loaded."""

    address: str
    """host:port of its service."""
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

    def log_tail(self) -> str:
        """The end of what it printed; empty where that is out of reach."""
        ...


class Launcher(Protocol):
    """Starts ranks, one at a time."""

    async def launch(self, settings: WorkerSettings, epoch: int) -> LaunchedWorker:
        """Raises WorkerLost when the process dies before it serves. Leaves nothing behind when cancelled."""
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


def log_path(state_dir: Path, settings: WorkerSettings, epoch: int) -> Path:
    """Where a rank of this machine logs: a file that is new. Makes the folder and keeps it from filling up.

    The name tells when and for which runtime: several may share the folder, and one in a container always has the same
    number. Names sort by age. Of older logs the last LOGS_KEPT stay.
    """
    folder = state_dir.absolute() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.glob("worker-*.log"))[:-LOGS_KEPT]:
        old.unlink(missing_ok=True)
    began = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    return folder / f"worker-{began}Z-runtime{os.getpid()}-rank{settings.tp_rank}-epoch{epoch}.log"


def tail_of(path: Path) -> str:
    """The last lines of a log, at most LOG_TAIL_BYTES of them; empty when there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
