"""Where ranks are asked to be placed, for clusters of all kinds. Pure functions; no Ray."""

from __future__ import annotations

import pytest

from parallel.mesh import Mesh
from runtime.cluster.ray_placement import RayNode, bundle_for, describe_shortage, plan_groups

CPU = {"CPU": 2}
GPU = {"CPU": 2, "GPU": 1}


def node(name: str, cpus: float, gpus: float = 0, *, free: float | None = None) -> RayNode:
    """free: CPUs and GPUs that are free, in that number of ranks' worth; unset: all."""
    total = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    left = total if free is None else {name: min(amount, 2 * free) for name, amount in total.items()}
    return RayNode(node_id=name, host=f"host-{name}", total=total, free=left)


def test_tensor_parallel_ranks_share_a_node_that_can_hold_them() -> None:
    (request,) = plan_groups(Mesh(tp=4), GPU, [node("a", 16, 2), node("b", 16, 4)])
    assert (request.strategy, request.node_id) == ("STRICT_PACK", "b")
    assert request.bundles == (GPU,) * 4


def test_a_node_that_is_busy_now_is_waited_for() -> None:
    (request,) = plan_groups(Mesh(tp=2), CPU, [node("a", 2), node("b", 4, free=0.5)])
    assert (request.strategy, request.node_id) == ("STRICT_PACK", None)


def test_ranks_that_no_node_can_hold_are_packed_on_few() -> None:
    (request,) = plan_groups(Mesh(tp=4), CPU, [node("a", 4), node("b", 4)])
    assert (request.strategy, request.node_id) == ("PACK", None)


def test_data_parallel_ranks_are_spread_over_nodes_each_whole_on_one() -> None:
    nodes = [node("a", 16), node("b", 16), node("c", 2)]
    requests = plan_groups(Mesh(dp=4, tp=2, ep=8), CPU, nodes)
    assert {request.strategy for request in requests} == {"STRICT_PACK"}
    assert sorted(request.node_id or "" for request in requests) == ["a", "a", "b", "b"]


def test_of_two_nodes_the_emptier_comes_first_and_a_full_one_not_at_all() -> None:
    nodes = [node("a", 8, free=1), node("b", 8), node("c", 8, free=0.5)]
    assert [request.node_id for request in plan_groups(Mesh(dp=3), CPU, nodes)] == ["b", "a", "b"]


def test_what_finds_no_room_any_more_is_left_to_ray() -> None:
    assert [request.node_id for request in plan_groups(Mesh(dp=2), CPU, [node("a", 2)])] == ["a", None]


@pytest.mark.parametrize(
    ("device", "nodes", "bundle"),
    [
        ("cpu", [node("a", 8, 8)], CPU),
        ("auto", [node("a", 8)], CPU),
        ("auto", [node("a", 8), node("b", 8, 1)], GPU),
        ("cuda", [node("a", 8)], GPU),
    ],
)
def test_a_rank_takes_a_gpu_where_there_are_any(device: str, nodes: list[RayNode], bundle: dict[str, float]) -> None:
    assert bundle_for(2, device, nodes) == bundle


def test_a_shortage_is_told_in_numbers() -> None:
    text = describe_shortage(Mesh(dp=2, tp=2), GPU, [node("a", 8, 4, free=1), node("b", 2)], 60)
    assert text.startswith(
        "Ray found no place for the ranks in 60 s. Demand: 4 × {CPU: 2, GPU: 1}, those of each data-parallel rank (2) "
        "on one node. Usage: node host-a: 6/8 CPU used, 2/4 GPU used; node host-b: 0/2 CPU used. "
    )
