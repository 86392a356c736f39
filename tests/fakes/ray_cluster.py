"""A Ray cluster of two nodes on loopback, for deployments to join: `python -m fakes.ray_cluster PORT`.

Prints a line when it is up; ends, daemons and all, when it is killed or its input closes.
"""

from __future__ import annotations

import os
import sys

os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"})

from ray._private import services
from ray.cluster_utils import Cluster

NUM_CPUS = 2
"""Of each node."""


def main(port: int) -> None:
    services.start_api_server = lambda *_arguments, **_options: (None, None)  # it would ask clouds about this machine
    node = {"num_cpus": NUM_CPUS, "object_store_memory": 80 * 1024 * 1024, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "gcs_server_port": port})
    del node["include_dashboard"]
    cluster.add_node(**node)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
