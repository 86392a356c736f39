"""Fixtures that the whole session shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from configs.schema import ClusterSettings


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for all tests marked `ray`: it takes seconds to start. Launchers use it and leave it running."""
    from runtime.cluster.ray_launcher import start_ray

    assert start_ray(ClusterSettings(), num_cpus=4, namespace="tests"), "a test has started a Ray of its own"
    import ray

    yield
    ray.shutdown()
