"""Where on a Ray cluster the ranks of a deployment go: one placement group per data-parallel rank. Knows no actors.

The tensor-parallel ranks of one group talk in every layer and belong on one node; data-parallel ranks are spread over
nodes, those with the fewest of ours first. Ray takes the node as a wish: where others have been quicker, it finds
another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from parallel.mesh import Mesh
from runtime.cluster.ray_session import PART_TIMEOUT_S, RaySession
from workers.plan import WorkerLost

Resources = Mapping[str, float]

WAIT_SLICE_S = 1.0
"""Longest single wait for a placement group: so soon after it is given up, the session's thread is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node of the cluster: its id, its host, all it has and what of it is free."""

    node_id: str
    host: str
    total: Resources
    free: Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """What is asked of Ray for one data-parallel rank. node_id: where it would best be."""

    bundles: tuple[Resources, ...]
    strategy: str
    node_id: str | None


def bundle_for(threads: int, device: str, nodes: Sequence[RayNode]) -> Resources:
    """What one rank needs. device: model.device; `auto` takes GPUs where the cluster has any."""
    has_gpus = any(node.total.get("GPU", 0) > 0 for node in nodes)
    return {"CPU": threads, "GPU": 1} if device == "cuda" or (device == "auto" and has_gpus) else {"CPU": threads}


def plan_groups(mesh: Mesh, bundle: Resources, nodes: Sequence[RayNode]) -> list[GroupRequest]:
    """One request per data-parallel rank: on one node where any could hold it, packed on few where none could."""
    whole = {name: amount * mesh.tp for name, amount in bundle.items()}
    fits_a_node = any(_holds(node.total, whole) for node in nodes)
    free = {node.node_id: dict(node.free) for node in nodes}
    num_here = dict.fromkeys(free, 0)
    requests = []
    for _ in range(mesh.dp):
        roomy = [node_id for node_id in free if _holds(free[node_id], whole)]
        chosen = min(roomy, key=lambda node_id: (num_here[node_id], -free[node_id].get("CPU", 0)), default=None)
        if chosen is not None:
            num_here[chosen] += 1
            for name, amount in whole.items():
                free[chosen][name] -= amount
        strategy = "STRICT_PACK" if fits_a_node else "PACK"
        requests.append(
            GroupRequest(
                bundles=(bundle,) * mesh.tp, strategy=strategy, node_id=chosen if strategy == "STRICT_PACK" else None
            )
        )
    return requests


def describe_shortage(mesh: Mesh, bundle: Resources, nodes: Sequence[RayNode], waited_s: float) -> str:
    """What was asked and what there is, in the words of `ray status`."""
    needs = _in_words(bundle)
    asked = f"{mesh.size} × {{{needs}}}"
    if mesh.tp > 1:
        asked += f", those of each data-parallel rank ({mesh.tp}) on one node"
    has = "; ".join(
        f"node {node.host}: "
        + ", ".join(
            f"{node.total[name] - node.free.get(name, 0):g}/{node.total[name]:g} {name} used"
            for name in ("CPU", "GPU")
            if node.total.get(name)
        )
        for node in nodes
    )
    return (
        f"Ray found no place for the ranks in {waited_s:g} s. Demand: {asked}. Usage: {has or 'no nodes'}. Free or add "
        "resources (`ray status` shows who holds them), or lower parallel.tp, parallel.dp, cluster.worker_threads, or "
        "set model.device"
    )


class Placement:
    """The placement groups of a deployment, kept over its lives. All calls go through `session`."""

    def __init__(self, session: RaySession, groups: Sequence[Any], mesh: Mesh, bundle: Resources) -> None:
        self.bundle = bundle
        self._session = session
        self._groups = tuple(groups)
        self._mesh = mesh

    @classmethod
    async def make(
        cls, session: RaySession, mesh: Mesh, *, threads: int, device: str, name: str, timeout_s: float
    ) -> Placement:
        """Raises WorkerLost when there is no place within `timeout_s`; nothing stays reserved then."""
        nodes = await session.call(cluster_nodes)
        bundle = bundle_for(threads, device, nodes)
        placement = cls(session, [], mesh, bundle)
        try:
            for dp_rank, request in enumerate(plan_groups(mesh, bundle, nodes)):
                group = await session.call(partial(_create, request, f"{name}-dp{dp_rank}"))
                placement._groups += (group,)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + timeout_s
            for group in placement._groups:
                while not await session.call(partial(group.wait, WAIT_SLICE_S)):
                    if loop.time() > deadline:
                        nodes = await session.call(cluster_nodes)
                        raise WorkerLost(describe_shortage(mesh, bundle, nodes, timeout_s))
        except BaseException:
            await placement.remove()
            raise
        return placement

    def of_rank(self, rank: int) -> tuple[Any, int]:
        """The rank's placement group and its bundle there."""
        return self._groups[self._mesh.dp_rank(rank)], self._mesh.tp_rank(rank)

    async def is_whole(self) -> bool:
        """Whether all groups are in place; a lost node takes those it held."""
        from ray.util.placement_group import placement_group_table

        tables = await self._session.call(lambda: [placement_group_table(group) for group in self._groups])
        return all(table.get("state") == "CREATED" for table in tables)

    async def remove(self) -> None:
        """Gives the resources back. Where Ray is lost there is nothing to give."""
        from ray.util.placement_group import remove_placement_group

        groups, self._groups = self._groups, ()
        if not self._session.lost.done():
            await self._session.call(
                lambda: [remove_placement_group(group) for group in groups], limit_s=PART_TIMEOUT_S
            )


def _create(request: GroupRequest, name: str) -> Any:
    from ray.util.placement_group import placement_group

    return placement_group(
        [dict(bundle) for bundle in request.bundles],
        strategy=request.strategy,
        name=name,
        _soft_target_node_id=request.node_id,
    )


def cluster_nodes() -> list[RayNode]:
    """Those that live, of the Ray that this process is in."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        RayNode(
            node_id=node["NodeID"],
            host=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def _holds(has: Resources, needs: Resources) -> bool:
    return all(has.get(name, 0) >= amount for name, amount in needs.items())


def _in_words(resources: Resources) -> str:
    return ", ".join(f"{name}: {amount:g}" for name, amount in resources.items())
