"""A real Ray cluster whose nodes are processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil


class RayCluster:
    """Owns a head without processors, and two nodes with two each. Used from the main thread."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.address: str = self._cluster.address
        self.nodes: dict[str, Any] = {}
        for _ in range(2):
            self.add()

    def add(self, gpu: str = "") -> str:
        """Adds a node with two processors, and what Ray takes for a GPU of a kind. Returns its name."""
        gpus: dict[str, Any] = {"num_gpus": 1, "resources": {f"accelerator_type:{gpu}": 1}} if gpu else {}
        node = self._cluster.add_node(num_cpus=2, **gpus)
        self.nodes[node.node_id] = node
        return str(node.node_id)

    def kill(self, node_id: str) -> None:
        """Ends a node with everything on it, as a power cut would."""
        self._cluster.remove_node(self.nodes.pop(node_id), allow_graceful=False)

    def node_of(self, pid: int) -> str:
        """Returns the node on which a process runs."""
        above = {parent.pid for parent in psutil.Process(pid).parents()}
        for node_id, node in self.nodes.items():
            if node.all_processes["raylet"][0].process.pid in above:
                return node_id
        raise AssertionError(f"process {pid} is on no node")

    def close(self) -> None:
        """Ends all nodes."""
        self._cluster.shutdown()


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Provides a cluster, which ends with the block."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = RayCluster()
    try:
        yield cluster
    finally:
        with suppress(OSError):
            cluster.close()
