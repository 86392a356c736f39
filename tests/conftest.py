"""Fixtures that the whole session shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

import runtime as _before_grpc  # noqa: F401
from configs.schema import ClusterSettings

# Property tests name no number of examples of their own; heavy ones take a part of the profile's. Where the environment
# says CI, hypothesis draws the same examples each time; elsewhere new ones.
settings.register_profile("quick", max_examples=80, deadline=None)
settings.register_profile("full", max_examples=1000, deadline=None)
settings.load_profile("quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the tests, those of a file stay together, for what they set up; and all that use
    Ray, of which there is one."""
    for item in items:
        uses_ray = item.get_closest_marker("ray") is not None
        item.add_marker(pytest.mark.xdist_group("ray" if uses_ray else str(item.path)))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for all tests marked `ray`: it takes seconds to start. Launchers use it and leave it running."""
    from runtime.cluster.ray_session import start_ray

    assert start_ray(ClusterSettings(), num_cpus=4, namespace="tests"), "a test has started a Ray of its own"
    import ray

    yield
    ray.shutdown()
