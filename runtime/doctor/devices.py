"""torch, GPUs and what carries collectives, as a child process with torch finds them; and collectives at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from runtime.doctor.child import ChildFailed, ask_child
from runtime.doctor.finding import Finding, failure, note, ok, size_text, warning
from runtime.doctor.inquiry import Inquiry

MEET_TIMEOUT_S = 20.0
"""How long processes of one machine may take to meet and add up a few numbers."""

_NO_NCCL = "set it to auto or gloo"
_REINSTALL = "install torch again, as README.md says, in a build for this machine"


def check_torch(inquiry: Inquiry) -> Iterator[Finding]:
    """Whether it can be loaded, and which GPUs it finds."""
    try:
        found = inquiry.devices()
    except ChildFailed as error:
        yield failure(f"torch cannot be used: {error}", _REINSTALL)
        return
    build = f"built for CUDA {found['cuda']}" if found["cuda"] else "built for CPUs"
    yield ok(f"torch {found['torch']}, {build}")
    device, num_ranks, gpus = inquiry.settings.model.device, inquiry.mesh.size, found["gpus"]
    for index, gpu in enumerate(gpus):
        yield ok(f"GPU {index}: {gpu['name']}, {size_text(gpu['free_bytes'])} of {size_text(gpu['total_bytes'])} free")
    if device == "cuda" and not gpus:
        remedy = "install the driver or a CUDA build of torch, or set model.device to cpu or auto"
        yield failure("model.device is cuda, and torch finds no GPU", remedy)
    elif gpus and device != "cpu" and num_ranks > len(gpus) and not inquiry.settings.cluster.ray_address:
        remedy = "lower parallel.tp or parallel.dp, or set model.device to cpu"
        yield failure(f"{num_ranks} ranks need a GPU each, and there are {len(gpus)}", remedy)
    elif not gpus:
        yield note("no GPU: ranks compute on CPUs")
    if gpus and device != "cpu" and not found["kernels"]:
        yield warning(
            "neither flashinfer nor triton is installed: GPUs run plain torch", "pip install flashinfer-python triton"
        )


def check_collectives(inquiry: Inquiry, ask: Callable[..., dict[str, Any]] = ask_child) -> Iterator[Finding]:
    """By meeting: two processes over gloo, and one per GPU over NCCL, where ranks would use it. ask: tests pass their
    own."""
    try:
        found = inquiry.devices()
    except ChildFailed:
        yield note("not looked at, since torch cannot be used")
        return
    num_ranks = inquiry.mesh.size
    if found["gloo"]:
        yield from _meet("gloo", 2, ask, is_needed=num_ranks > 1)
    else:
        yield failure("torch is built without gloo", _REINSTALL)
    wants_gpus = bool(found["gpus"]) and inquiry.settings.model.device != "cpu"
    if inquiry.settings.cluster.collectives == "nccl" and not wants_gpus:
        text = "cluster.collectives is nccl, and ranks run on CPUs"
        yield failure(text, _NO_NCCL) if num_ranks > 1 else warning(f"{text}; one rank does without", _NO_NCCL)
    elif wants_gpus and inquiry.settings.cluster.collectives != "gloo" and len(found["gpus"]) > 1:
        yield from _meet(
            "nccl", min(num_ranks if num_ranks > 1 else 2, len(found["gpus"])), ask, is_needed=num_ranks > 1
        )
        yield note(f"NCCL {found['nccl']}")


def _meet(carrier: str, size: int, ask: Callable[..., dict[str, Any]], *, is_needed: bool) -> Iterator[Finding]:
    try:
        problem = ask(
            *("workers.checkup", "collectives", carrier, f"--size={size}", f"--timeout-s={MEET_TIMEOUT_S}"),
            timeout_s=2 * MEET_TIMEOUT_S,
        )["problem"]
    except ChildFailed as error:
        problem = str(error)
    if not problem:
        yield ok(f"{carrier}: {size} processes of this machine met and added up")
        return
    text = f"{carrier}: {size} processes of this machine did not come together: {problem}"
    if carrier == "gloo":
        remedy = "look whether loopback is up and whether a firewall or a proxy stands before it"
    else:
        remedy = "look at NCCL_SOCKET_IFNAME and NCCL_DEBUG=INFO, at /dev/shm, or set cluster.collectives to gloo"
    yield failure(text, remedy) if is_needed else warning(f"{text}; one rank does without", remedy)
