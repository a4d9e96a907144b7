"""What the search decides: workers of each role, their parallelism, and where they stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon.policy.cluster_view import Role
from halfmoon.sim.cluster import BatchLimits, ClusterSpec, Network, Targets, WorkerGroup
from halfmoon.sim.latency import LatencyModel


class Parallelism(NamedTuple):
    """Devices of one worker: `tensor` share each layer, `pipeline` stages have some of the layers each."""

    tensor: int
    pipeline: int

    @property
    def num_devices(self) -> int:
        """Of one worker."""
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        return f"TP{self.tensor}" + (f"xPP{self.pipeline}" if self.pipeline > 1 else "")


class WorkerSet(NamedTuple):
    """Equal workers."""

    role: Role
    parallelism: Parallelism
    num: int

    def __str__(self) -> str:
        return f"{self.num} {self.role} {self.parallelism}"


@dataclass(frozen=True, slots=True)
class Layout:
    """`num_units` times the same sets of workers; a unit shares its nodes, so that KV stays on the links within them.

    One unit without `is_paired` is a cluster whose prefill and decode workers may stand on different nodes.
    """

    sets: tuple[WorkerSet, ...]
    num_units: int = 1
    is_paired: bool = False

    @property
    def is_colocated(self) -> bool:
        """Whether workers do both halves."""
        return self.sets[0].role == "both"

    @property
    def unit_gpus(self) -> int:
        """Devices of one unit."""
        return sum(one.num * one.parallelism.num_devices for one in self.sets)

    @property
    def num_gpus(self) -> int:
        """Devices of all units."""
        return self.num_units * self.unit_gpus

    def count(self, role: Role) -> int:
        """Workers of a role, in all units."""
        return self.num_units * sum(one.num for one in self.sets if one.role == role)

    def fits(self, num_nodes: int, gpus_per_node: int) -> bool:
        """Whether so many nodes have room, the workers of each set packed on nodes of their own.

        A unit is within one node, or its workers have equally many stages and each node has one stage of all
        (DistServe, algorithm 2).
        """
        if not self.is_paired:
            return sum(_nodes(one, gpus_per_node) for one in self.sets) <= num_nodes or (
                num_nodes == 1 and self.num_gpus <= gpus_per_node
            )
        if self.unit_gpus <= gpus_per_node:
            return self.num_units <= num_nodes * (gpus_per_node // self.unit_gpus)
        stages = {one.parallelism.pipeline for one in self.sets}
        stage_gpus = sum(one.num * one.parallelism.tensor for one in self.sets)
        if len(stages) > 1 or stage_gpus > gpus_per_node:
            return False
        return self.num_units * stages.pop() <= num_nodes * (gpus_per_node // stage_gpus)

    def __str__(self) -> str:
        text = " + ".join(map(str, self.sets))
        if self.num_units > 1:
            text = f"{self.num_units} x ({text})"
        return f"{text}, paired" if self.is_paired else text


def _nodes(one: WorkerSet, gpus_per_node: int) -> float:
    """Nodes, or the share of one, that a set takes."""
    if one.parallelism.num_devices >= gpus_per_node:
        return one.num * -(-one.parallelism.num_devices // gpus_per_node)
    per_node = gpus_per_node // one.parallelism.num_devices
    whole, rest = divmod(one.num, per_node)
    return whole + rest * one.parallelism.num_devices / gpus_per_node


@dataclass(frozen=True, slots=True)
class Rules:
    """How workers batch, by role, and what is between them."""

    limits: Mapping[Role, BatchLimits]
    network: Network


def unit_spec(
    layout: Layout,
    models: Mapping[Parallelism, LatencyModel],
    rules: Rules,
    targets: Targets,
    gpus_per_node: int,
    price_per_gpu: float = 0.0,
) -> ClusterSpec:
    """One unit as the simulator takes it. A set that is not paired has nodes of its own."""
    groups = [
        WorkerGroup(
            one.role,
            one.num,
            models[one.parallelism],
            rules.limits[one.role],
            workers_per_node=one.num if layout.is_paired else max(gpus_per_node // one.parallelism.num_devices, 1),
            first_node=0 if layout.is_paired else None,
            price_per_hour=price_per_gpu * one.parallelism.num_devices,
        )
        for one in layout.sets
    ]
    return ClusterSpec(tuple(groups), rules.network, targets=targets)
