"""Whether parameters, pools and processes fit into this machine, or into its GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.doctor.child import ChildFailed
from runtime.doctor.finding import Finding, counted, failure, note, ok, size_text, warning
from runtime.doctor.inquiry import Inquiry

RANK_BYTES = 600 << 20
"""A rank's process beside what it allocates: Python, torch and its buffers. Measured with torch 2.13 on a CPU, where it
is 350 MiB, and rounded up."""
GPU_RANK_BYTES = 1 << 30
"""What CUDA, its libraries and buffers take of a GPU beside that."""
RUNTIME_BYTES = 400 << 20
"""This process, with Ray's daemons where there are such."""


def check_memory(inquiry: Inquiry) -> Iterator[Finding]:
    """Of this machine; of a cluster's nodes nothing is known here."""
    if inquiry.settings.cluster.ray_address:
        yield note("ranks run where the Ray cluster puts them; its nodes' memory is not looked at")
        return
    try:
        found = inquiry.checkpoint()
    except ChildFailed:
        found = {"problem": "unknown"}
    if found["problem"]:
        yield note("not reckoned, since the checkpoint cannot be read; see there")
        return
    ranks = [parameters + found["state_bytes"] for parameters in found["parameter_bytes"]]
    if found["device"] == "cuda":
        yield from _gpus(inquiry, ranks)
        wanted = len(ranks) * RANK_BYTES + RUNTIME_BYTES
    else:
        wanted = sum(ranks) + len(ranks) * RANK_BYTES + RUNTIME_BYTES
    available = inquiry.machine.memory_bytes()
    if available is None:
        yield note(f"about {size_text(wanted)} are wanted; how much there is nobody tells")
        return
    text = (
        f"{size_text(available)} are available; {counted(len(ranks), 'rank')} with "
        f"{size_text(max(found['parameter_bytes']))} of parameters and {size_text(found['state_bytes'])} of pools "
        f"each, and the runtime, want about {size_text(wanted)}"
    )
    remedy = "lower cache.memory_mib or the number of ranks, or give it more memory"
    if wanted > available:
        yield failure(text, remedy)
    elif wanted > 0.9 * available:
        yield warning(text, remedy)
    else:
        yield ok(text)


def _gpus(inquiry: Inquiry, ranks: list[int]) -> Iterator[Finding]:
    for index, (gpu, needed) in enumerate(zip(inquiry.devices()["gpus"], ranks, strict=False)):
        wanted = needed + GPU_RANK_BYTES
        text = f"GPU {index}: {size_text(gpu['free_bytes'])} are free, its rank wants about {size_text(wanted)}"
        if wanted > gpu["free_bytes"]:
            yield failure(text, "lower cache.memory_mib, raise parallel.tp, or end what else runs on it (nvidia-smi)")
        else:
            yield ok(text)
