"""Folders that are written to: whether they can be, and how much room there is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from runtime.doctor.finding import Finding, failure, ok, size_text, warning
from runtime.doctor.inquiry import Inquiry

LEAST_FREE = 64 << 20
"""Bytes below which a log or a profile may soon not be written."""
GOOD_FREE = 1 << 30

RAY_SHM = 80 << 20
"""Ray's least object store, which it keeps in shared memory."""
RANK_SHM = 32 << 20
"""What collectives of a rank may keep there: NCCL's buffers between GPUs of one node are of that order."""


def check_state_dir(inquiry: Inquiry) -> Iterator[Finding]:
    """Where the policy, profiles and logs of ranks are kept. Creates nothing."""
    wanted = inquiry.settings.state_dir.absolute()
    folder = next((one for one in (wanted, *wanted.parents) if one.exists()), Path("/"))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield failure(
            f"state_dir {wanted} cannot be written" + ("" if folder == wanted else f": {folder} cannot be"),
            "set state_dir to a folder that this user may write, or mount one there",
        )
        return
    yield from _room("state_dir", folder, inquiry.machine.free_bytes(folder))


def check_temporary(inquiry: Inquiry) -> Iterator[Finding]:
    """Ray and compilers write there."""
    folder = Path(inquiry.machine.environment.get("TMPDIR") or "/tmp")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield failure(f"{folder} cannot be written", "mount a writable folder there (emptyDir), or set TMPDIR to one")
        return
    yield from _room("temporary files", folder, inquiry.machine.free_bytes(folder))


def check_shared_memory(inquiry: Inquiry) -> Iterator[Finding]:
    """Used by Ray, and by ranks of one machine between them."""
    machine, cluster = inquiry.machine, inquiry.settings.cluster
    num_ranks = inquiry.mesh.size
    wanted = (RAY_SHM if cluster.launcher == "ray" else 0) + (RANK_SHM * num_ranks if num_ranks > 1 else 0)
    try:
        size, free = machine.total_bytes(machine.shm), machine.free_bytes(machine.shm)
    except OSError as error:
        if wanted:
            yield failure(f"{machine.shm}: {error.strerror}", "mount a tmpfs there")
        else:
            yield ok(f"{machine.shm} is not there, and nothing needs it")
        return
    text = f"{machine.shm}: {size_text(free)} of {size_text(size)} are free, {size_text(wanted)} are wanted"
    if free >= wanted:
        yield ok(text)
    else:
        remedy = "enlarge it: an emptyDir with medium Memory and a sizeLimit at /dev/shm, or docker run --shm-size"
        yield warning(text, remedy)


def _room(what: str, folder: Path, free: int) -> Iterator[Finding]:
    text = f"{what}: {size_text(free)} are free in {folder}"
    if free < LEAST_FREE:
        yield failure(text, "make room there, or move it")
    elif free < GOOD_FREE:
        yield warning(text, f"have {size_text(GOOD_FREE)} free: logs and profiles are kept there")
    else:
        yield ok(text)
