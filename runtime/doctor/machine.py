"""What this machine has for us, as the kernel and the container's limits tell it. Knows no settings."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

_TIME_ERROR = 5
"""What adjtimex answers where nobody keeps the clock (adjtimex(2))."""


def _is_clock_kept() -> bool | None:
    """Whether the kernel takes its clock for synchronised; None where it does not say."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # modes 0: asks, sets nothing
    except (AttributeError, OSError):
        return None
    return None if state < 0 else state != _TIME_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where to look, and what is asked of the kernel; tests put their own in its place.

    proc, cgroup, shm: /proc, /sys/fs/cgroup and /dev/shm. environment: variables of this process. limit: soft and hard
    one of a resource. num_cpus: those that this process may run on. is_clock_kept: see `_is_clock_kept`.
    """

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    shm: Path = Path("/dev/shm")
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    num_cpus: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    is_clock_kept: Callable[[], bool | None] = _is_clock_kept
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    total_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).total

    def memory_bytes(self) -> int | None:
        """What can still be had without swapping, within the container's limit; None where nobody tells."""
        found = [self._available(), self._left_in_cgroup()]
        return min((one for one in found if one is not None), default=None)

    def cpu_share(self) -> float:
        """CPUs' worth of time: those that may be used, or the container's quota where it is less."""
        try:
            quota, period = (self.cgroup / "cpu.max").read_text().split()
            return min(float(self.num_cpus), int(quota) / int(period))
        except (OSError, ValueError):  # no such limit, or max
            return float(self.num_cpus)

    def _available(self) -> int | None:
        try:
            lines = (self.proc / "meminfo").read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
        return None

    def _left_in_cgroup(self) -> int | None:
        try:
            most = int((self.cgroup / "memory.max").read_text())
            return most - int((self.cgroup / "memory.current").read_text())
        except (OSError, ValueError):
            return None
