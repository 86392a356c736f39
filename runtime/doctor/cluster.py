"""Ray: whether one can be started here or joined, and whether it has room for the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from runtime.cluster.ray_placement import RayNode, bundle_for
from runtime.doctor.child import ChildFailed, ask_child
from runtime.doctor.finding import Finding, counted, failure, note, ok, warning
from runtime.doctor.inquiry import Inquiry

RAY_TIMEOUT_S = 60.0
"""A start takes 5 s on a machine that is not busy."""


def check_ray(inquiry: Inquiry, ask: Callable[..., dict[str, Any]] = ask_child) -> Iterator[Finding]:
    """Joins or starts one, for a moment. ask: tests pass their own."""
    cluster = inquiry.settings.cluster
    if cluster.launcher != "ray":
        yield note("cluster.launcher is process: Ray is not used")
        return
    where = f"Ray at {cluster.ray_address}" if cluster.ray_address else "a Ray of our own"
    try:
        found = ask("runtime.doctor.ray_child", timeout_s=RAY_TIMEOUT_S, given=cluster.model_dump_json())
    except ChildFailed as error:
        if cluster.ray_address:
            remedy = (
                "look whether it runs (`ray status` on its head), and whether its version is the one installed here"
            )
        else:
            remedy = (
                "look at /tmp/ray/session_latest/logs, at /dev/shm and at limits; or set cluster.launcher to process"
            )
        yield failure(f"{where} cannot be had: {error}", remedy)
        return
    nodes = [RayNode(node_id=node["host"], **node) for node in found["nodes"]]
    yield ok(f"{where}, version {found['version']}: {counted(len(nodes), 'node')}")
    if cluster.ray_address:
        yield from _room(inquiry, nodes)


def _room(inquiry: Inquiry, nodes: list[RayNode]) -> Iterator[Finding]:
    size = inquiry.mesh.size
    bundle = bundle_for(inquiry.settings.cluster.worker_threads, inquiry.settings.model.device, nodes)

    def places(free: bool) -> int:
        return sum(
            int(min((node.free if free else node.total).get(name, 0) // amount for name, amount in bundle.items()))
            for node in nodes
        )

    needs = ", ".join(f"{name}: {amount:g}" for name, amount in bundle.items())
    if places(free=True) >= size:
        yield ok(f"it has room for {size} ranks of {{{needs}}}")
    elif places(free=False) >= size:
        yield warning(
            f"it has room for {places(free=True)} of {size} ranks of {{{needs}}} at the moment",
            "end what holds the rest (`ray status` says who), or wait for it",
        )
    else:
        yield failure(
            f"it has room for {places(free=False)} ranks of {{{needs}}}, and {size} are wanted",
            "add nodes, or lower parallel.tp, parallel.dp or cluster.worker_threads",
        )
