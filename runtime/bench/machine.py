"""What the machine at hand is called and has. Reads /proc; knows nothing of what is measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from runtime.bench.document import Machine


def machine() -> Machine:
    return Machine(
        cpu=cpu_model(Path("/proc/cpuinfo")),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def cpu_model(cpuinfo: Path) -> str:
    """The model's name, or the architecture's where the file has none (Arm machines) or is not there."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.machine()
