"""`outrider doctor` in a real Ray: joined by a child, which leaves it running."""

from __future__ import annotations

import pytest

from configs.schema import ClusterSettings
from runtime.doctor.child import ask_child


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_child_joins_a_ray_and_tells_its_nodes() -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    found = ask_child(
        "runtime.doctor.ray_child", timeout_s=120, given=ClusterSettings(ray_address=address).model_dump_json()
    )
    assert found["version"] == ray.__version__
    [node] = found["nodes"]
    assert node["total"]["CPU"] == 4
    assert ray.is_initialized()
    assert len(ray.nodes()) == 1


@pytest.mark.full
def test_a_child_starts_a_ray_of_its_own_and_ends_it() -> None:
    found = ask_child("runtime.doctor.ray_child", timeout_s=120, given=ClusterSettings().model_dump_json())
    assert len(found["nodes"]) == 1
