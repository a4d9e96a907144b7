"""A layout, which the search decides on: workers of each role, their parallelism, and their placement on nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from halfmoon.plan.node_pools import Fleet, NodePool
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import BatchLimits, Network
from halfmoon.sim.cluster.kv_codecs import KvCodecName
from halfmoon.sim.latency_sources.host_workers import NOTHING, HostShare

One = TypeVar("One")


class Parallelism(NamedTuple):
    """Devices of one worker: `tensor` devices share each layer, and each of `pipeline` stages has some of the layers;
    or `sequence` devices have the whole model and share the tokens of long prompts.
    """

    tensor: int
    pipeline: int
    sequence: int = 1

    @property
    def num_devices(self) -> int:
        """Devices of one worker."""
        return self.tensor * self.pipeline * self.sequence

    def __str__(self) -> str:
        if self.sequence > 1:
            return f"SP{self.sequence}"
        return f"TP{self.tensor}" + (f"xPP{self.pipeline}" if self.pipeline > 1 else "")


class WorkerKind(NamedTuple):
    """The GPU and the parallelism of a worker, and what the GPUs' memory does not hold and its host's does."""

    gpu: str
    parallelism: Parallelism
    host: HostShare = NOTHING

    @property
    def num_devices(self) -> int:
        """Devices of one worker."""
        return self.parallelism.num_devices

    def __str__(self) -> str:
        """Without the GPU."""
        return f"{self.parallelism} with {self.host}" if any(self.host) else f"{self.parallelism}"


class WorkerSet(NamedTuple):
    """Equal workers."""

    role: Role
    kind: WorkerKind
    num: int

    @property
    def num_gpus(self) -> int:
        """Devices of all its workers."""
        return self.num * self.kind.num_devices


@dataclass(frozen=True, slots=True)
class Layout:
    """`num_units` times the same sets of workers. The workers of a paired unit share nodes, so KV stays on the links
    within them.

    One unit without `is_paired` is a cluster whose prefill and decode workers may be on different nodes. The workers of
    a role are of one kind, or of several if one kind of GPU does not suffice. Up to `prefill_degree` prefill workers of
    a unit compute one prompt together, where the gateway's rule says that it pays.
    """

    sets: tuple[WorkerSet, ...]
    num_units: int = 1
    is_paired: bool = False
    codec: KvCodecName = "raw"
    prefill_degree: int = 1

    @property
    def is_colocated(self) -> bool:
        """Whether workers do both phases."""
        return self.sets[0].role == "both"

    @property
    def unit_gpus(self) -> int:
        """Devices of one unit."""
        return sum(workers.num_gpus for workers in self.sets)

    @property
    def num_gpus(self) -> int:
        """Devices of all units."""
        return self.num_units * self.unit_gpus

    def count(self, role: Role) -> int:
        """Workers of a role in all units."""
        return self.num_units * sum(workers.num for workers in self.sets if workers.role == role)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The kinds of GPU that it needs."""
        return tuple(dict.fromkeys(workers.kind.gpu for workers in self.sets))

    def price_per_hour(self, fleet: Fleet) -> float:
        """Dollars per hour."""
        return self.num_units * sum(
            workers.num_gpus * fleet.pool(workers.kind.gpu).gpu.price_per_hour for workers in self.sets
        )

    def fits(self, fleet: Fleet) -> bool:
        """Whether the nodes have room, with the workers of each set packed on nodes of their own.

        A paired unit fits into one node, or its workers have the same number of stages and each node holds one stage of
        all of them (DistServe, algorithm 2).
        """
        if self.is_paired:
            return len(self.gpus) == 1 and self._units_fit(fleet.pool(self.gpus[0]))
        return all(
            _sets_fit([workers for workers in self.sets if workers.kind.gpu == gpu], fleet.pool(gpu))
            for gpu in self.gpus
        )

    def _units_fit(self, pool: NodePool) -> bool:
        if self.unit_gpus <= pool.gpus_per_node:
            return self.num_units <= pool.num_nodes * (pool.gpus_per_node // self.unit_gpus)
        stages = {workers.kind.parallelism.pipeline for workers in self.sets}
        stage_gpus = sum(
            workers.num * (workers.kind.num_devices // workers.kind.parallelism.pipeline) for workers in self.sets
        )
        if len(stages) > 1 or stage_gpus > pool.gpus_per_node:
            return False
        return _nodes_of_stages(self.num_units, stages.pop(), pool.gpus_per_node // stage_gpus) <= pool.num_nodes

    def __str__(self) -> str:
        return self.text(named=len(self.gpus) > 1)

    def text(self, *, named: bool) -> str:
        """In words, with or without the names of the GPUs."""
        gpu = "{0.kind.gpu} " if named else ""
        text = " + ".join(f"{{0.num}} {{0.role}} {gpu}{{0.kind}}".format(workers) for workers in self.sets)
        if self.num_units > 1:
            text = f"{self.num_units} x ({text})"
        degree = "" if self.prefill_degree == 1 else f", prefill degree {self.prefill_degree}"
        codec = "" if self.codec == "raw" else f", {self.codec} KV"
        return f"{text}{', paired' if self.is_paired else ''}{degree}{codec}"


def first_of_each_kind(ordered: Sequence[One], layout_of: Callable[[One], Layout]) -> dict[bool, One]:
    """The first item with colocated (True) and with disaggregated (False) workers, if there is one."""
    return {layout_of(candidate).is_colocated: candidate for candidate in reversed(ordered)}


def _sets_fit(sets: Sequence[WorkerSet], pool: NodePool) -> bool:
    return sum(_nodes(workers, pool.gpus_per_node) for workers in sets) <= pool.num_nodes or (
        pool.num_nodes == 1 and sum(workers.num_gpus for workers in sets) <= pool.gpus_per_node
    )


def _nodes(workers: WorkerSet, gpus_per_node: int) -> float:
    """Nodes, or the fraction of one, that a set takes."""
    if workers.kind.num_devices >= gpus_per_node:
        num_stages = workers.kind.parallelism.pipeline
        return workers.num * -(-num_stages // (gpus_per_node // (workers.kind.num_devices // num_stages)))
    per_node = gpus_per_node // workers.kind.num_devices
    whole, rest = divmod(workers.num, per_node)
    return whole + rest * workers.kind.num_devices / gpus_per_node


def _nodes_of_stages(num_units: int, num_stages: int, per_node: int) -> int:
    """Nodes of units of which each node holds as many stages as fit, as they are started; the last stages of several
    units may share a node.
    """
    whole, rest = divmod(num_stages, per_node)
    return num_units * whole + (-(-num_units // (per_node // rest)) if rest else 0)


@dataclass(frozen=True, slots=True)
class Rules:
    """Batch limits by role, and networks by GPU."""

    limits: Mapping[Role, BatchLimits]
    networks: Mapping[str, Network]
