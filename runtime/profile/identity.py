"""What a profile is of, as ranks and settings tell it, and how two of those differ. Pure."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Sequence

from configs.schema import ServeSettings
from parallel.mesh import Mesh
from runtime.profile.document import Identity
from workers.plan import WorkerDescription

DIGEST_CHARACTERS = 12


def identity_of(settings: ServeSettings, mesh: Mesh, ranks: Sequence[WorkerDescription]) -> Identity:
    """ranks: each one's description, in order."""
    first = ranks[0]
    return Identity(
        model_type=first.model_type,
        checkpoint=first.checkpoint,
        dtype=first.dtype,
        numerics=first.numerics,
        devices=tuple(rank.device.partition(":")[0] for rank in ranks),
        machines=tuple(rank.machine for rank in ranks),
        torch_version=first.torch_version,
        outrider_version=importlib.metadata.version("outrider"),
        dp=mesh.dp,
        tp=mesh.tp,
        ep=mesh.ep,
        worker_threads=settings.cluster.worker_threads,
        collectives=_collectives(settings, ranks),
        page_size=first.page_size,
        gamma_max=first.gamma_max,
        max_step_tokens=settings.scheduler.max_step_tokens,
    )


def _collectives(settings: ServeSettings, ranks: Sequence[WorkerDescription]) -> str:
    """What `auto` comes to."""
    if len(ranks) == 1:
        return "none"
    on_gpus = all(rank.device.startswith("cuda") for rank in ranks)
    return "nccl" if on_gpus and settings.cluster.collectives != "gloo" else "gloo"


def digest(identity: Identity) -> str:
    """A name for it, of DIGEST_CHARACTERS hexadecimal digits."""
    return hashlib.sha256(identity.model_dump_json().encode()).hexdigest()[:DIGEST_CHARACTERS]


def differences(of: Identity, wanted: Identity) -> list[str]:
    """One clause for each field that differs: what it is, and what it should be."""
    return [
        f"{name} is {_text(getattr(of, name))}, here it is {_text(getattr(wanted, name))}"
        for name in Identity.model_fields
        if getattr(of, name) != getattr(wanted, name)
    ]


def _text(value: object) -> str:
    """Of what all ranks have alike, one."""
    if isinstance(value, tuple):
        distinct = list(dict.fromkeys(value))
        times = f" x {len(value)}" if len(distinct) == 1 and len(value) > 1 else ""
        return ", ".join(each or "unknown" for each in distinct) + times
    return str(value) or "unknown"
