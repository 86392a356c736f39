"""What a rank runs on, in words that are the same for the same hardware. Knows no model."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")


def name_machine(device: torch.device, threads: int) -> str:
    """The GPU with its memory, or the CPU with the threads that the rank computes on."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{torch.cuda.get_device_name(device)}, {properties.total_memory >> 30} GiB, CUDA {torch.version.cuda}"
    return f"{_cpu_name(_CPU_INFO)}, {threads} thread{'s' * (threads != 1)}"


def _cpu_name(cpu_info: Path) -> str:
    """The first "model name" that Linux tells; elsewhere, and where it tells none, the architecture."""
    lines = cpu_info.read_text(errors="replace").splitlines() if cpu_info.exists() else []
    names = [value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name"]
    return names[0] if names and names[0] else platform.machine()
