"""Enters Ray as a server would, says which nodes it has, and leaves: `python -m runtime.doctor.ray_child`.

In a process of its own: what Ray leaves behind where it fails ends with it. Settings come on standard input as
ClusterSettings.
"""

from __future__ import annotations

import json
import sys

from configs.schema import ClusterSettings
from runtime.cluster.ray_session import start_ray


def main() -> None:
    """Prints the nodes: host, all they have and what of it is free."""
    cluster = ClusterSettings.model_validate_json(sys.stdin.read())
    start_ray(cluster, num_cpus=1, namespace="outrider-doctor")
    import ray

    from runtime.cluster.ray_placement import cluster_nodes

    found = [{"host": node.host, "total": dict(node.total), "free": dict(node.free)} for node in cluster_nodes()]
    print(json.dumps({"nodes": found, "version": ray.__version__}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
