"""A supervised rank for the tests of launchers: begun, handed over, ended; and whether a process is gone."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from runtime.cluster.supervisor import RunningWorker, WorkerSupervisor


@asynccontextmanager
async def begun(supervisor: WorkerSupervisor) -> AsyncIterator[tuple[WorkerSupervisor, RunningWorker]]:
    """Starts the rank; stops the supervisor on leaving, also where the start failed."""
    try:
        yield supervisor, await supervisor.start(lambda *_: None)
    finally:
        await supervisor.stop()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
