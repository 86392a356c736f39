"""What checks are given in tests: settings, a machine that has enough of everything, and children that say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from configs.load import load_settings
from runtime.doctor.child import ChildFailed
from runtime.doctor.finding import Finding, Level
from runtime.doctor.inquiry import Inquiry
from runtime.doctor.machine import Machine

NOW = datetime(2027, 1, 1, tzinfo=UTC)
GIB = 1 << 30
DEVICES: dict[str, Any] = {"torch": "2.13.0", "cuda": None, "gpus": [], "nccl": None, "gloo": True, "kernels": []}
GPU = {"name": "a GPU", "total_bytes": 80 * GIB, "free_bytes": 79 * GIB}
CHECKPOINT: dict[str, Any] = {
    "problem": "",
    "model_type": "qwen3_next",
    "checkpoint": "abc",
    "num_tensors": 270,
    "dtype": "float32",
    "gamma_max": 8,
    "parameter_bytes": [30 << 20],
    "state_bytes": 256 << 20,
    "num_slots": 64,
    "device": "cpu",
    "machine": "a CPU, 1 thread",
    "torch": "2.13.0",
}
MACHINE = Machine(
    environment={},
    limit=lambda resource: (1 << 20, 1 << 20),
    num_cpus=8,
    is_clock_kept=lambda: True,
    now=lambda: NOW,
    free_bytes=lambda path: 100 * GIB,
    total_bytes=lambda path: 200 * GIB,
)


def inquiry(
    *,
    machine: Machine = MACHINE,
    devices: dict[str, Any] | None = DEVICES,
    checkpoint: dict[str, Any] | None = CHECKPOINT,
    **settings: Any,
) -> Inquiry:
    """settings: with `__` for the dots of their keys. devices, checkpoint: None where the child fails."""

    def say(found: dict[str, Any] | None) -> dict[str, Any]:
        if found is None:
            raise ChildFailed("ImportError: libtorch is a teapot")
        return found

    overrides = {"cluster.launcher": "process", **{key.replace("__", "."): value for key, value in settings.items()}}
    return Inquiry(load_settings(None, overrides), machine, lambda: say(devices), lambda: say(checkpoint))


def levels(findings: Iterator[Finding]) -> list[str]:
    """And that whatever is wrong comes with a remedy."""
    found = list(findings)
    assert all(finding.text for finding in found)
    assert all(finding.remedy for finding in found if finding.level in (Level.WARNING, Level.FAILURE)), found
    return [finding.level.value for finding in found]


def text_of(findings: Iterator[Finding]) -> str:
    """Of all of them."""
    return "\n".join(f"{finding.level.value}: {finding.text}; {finding.remedy}" for finding in findings)


def with_room(free: int, total: int = 200 * GIB) -> Machine:
    """A machine whose disks have so much."""
    return replace(MACHINE, free_bytes=lambda path: free, total_bytes=lambda path: total)


def proc_with(folder: Path, available_kib: int, *, most: str = "max", current: int = 0) -> Machine:
    """A machine with so much memory, in a container that may have `most` bytes of it."""
    (folder / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    return replace(MACHINE, proc=folder, cgroup=folder)
