"""What the search decides: workers of each role, their parallelism, and where they stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from halfmoon.plan.node_pools import Fleet, NodePool
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import BatchLimits, Network
from halfmoon.sim.cluster.kv_codecs import KvCodecName

One = TypeVar("One")


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


class WorkerKind(NamedTuple):
    """What a worker is of."""

    gpu: str
    parallelism: Parallelism

    @property
    def num_devices(self) -> int:
        """Of one worker."""
        return self.parallelism.num_devices


class WorkerSet(NamedTuple):
    """Equal workers."""

    role: Role
    kind: WorkerKind
    num: int

    @property
    def num_gpus(self) -> int:
        """Of all its workers."""
        return self.num * self.kind.num_devices


@dataclass(frozen=True, slots=True)
class Layout:
    """`num_units` times the same sets of workers; a unit shares its nodes, so that KV stays on the links within them.

    One unit without `is_paired` is a cluster whose prefill and decode workers may stand on different nodes. Workers of
    one role are of one kind, or of several where one kind of GPU is not enough.
    """

    sets: tuple[WorkerSet, ...]
    num_units: int = 1
    is_paired: bool = False
    codec: KvCodecName = "raw"

    @property
    def is_colocated(self) -> bool:
        """Whether workers do both halves."""
        return self.sets[0].role == "both"

    @property
    def unit_gpus(self) -> int:
        """Devices of one unit."""
        return sum(one.num_gpus for one in self.sets)

    @property
    def num_gpus(self) -> int:
        """Devices of all units."""
        return self.num_units * self.unit_gpus

    def count(self, role: Role) -> int:
        """Workers of a role, in all units."""
        return self.num_units * sum(one.num for one in self.sets if one.role == role)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The kinds of GPU that it needs."""
        return tuple(dict.fromkeys(one.kind.gpu for one in self.sets))

    def price_per_hour(self, fleet: Fleet) -> float:
        """Dollars."""
        return self.num_units * sum(one.num_gpus * fleet.pool(one.kind.gpu).gpu.price_per_hour for one in self.sets)

    def fits(self, fleet: Fleet) -> bool:
        """Whether the nodes have room, the workers of each set packed on nodes of their own.

        A unit is within one node, or its workers have equally many stages and each node has one stage of all
        (DistServe, algorithm 2).
        """
        if self.is_paired:
            return len(self.gpus) == 1 and self._units_fit(fleet.pool(self.gpus[0]))
        return all(_sets_fit([one for one in self.sets if one.kind.gpu == gpu], fleet.pool(gpu)) for gpu in self.gpus)

    def _units_fit(self, pool: NodePool) -> bool:
        if self.unit_gpus <= pool.gpus_per_node:
            return self.num_units <= pool.num_nodes * (pool.gpus_per_node // self.unit_gpus)
        stages = {one.kind.parallelism.pipeline for one in self.sets}
        stage_gpus = sum(one.num * one.kind.parallelism.tensor for one in self.sets)
        if len(stages) > 1 or stage_gpus > pool.gpus_per_node:
            return False
        return self.num_units * stages.pop() <= pool.num_nodes * (pool.gpus_per_node // stage_gpus)

    def __str__(self) -> str:
        return self.text(named=len(self.gpus) > 1)

    def text(self, *, named: bool) -> str:
        """With or without the names of the GPUs."""
        gpu = "{0.kind.gpu} " if named else ""
        text = " + ".join(f"{{0.num}} {{0.role}} {gpu}{{0.kind.parallelism}}".format(one) for one in self.sets)
        if self.num_units > 1:
            text = f"{self.num_units} x ({text})"
        codec = "" if self.codec == "raw" else f", {self.codec} KV"
        return f"{text}, paired{codec}" if self.is_paired else text + codec


def first_of_each_kind(ordered: Sequence[One], layout_of: Callable[[One], Layout]) -> dict[bool, One]:
    """By whether its workers do both halves; a kind that is not among them is missing."""
    return {layout_of(one).is_colocated: one for one in reversed(ordered)}


def _sets_fit(sets: Sequence[WorkerSet], pool: NodePool) -> bool:
    return sum(_nodes(one, pool.gpus_per_node) for one in sets) <= pool.num_nodes or (
        pool.num_nodes == 1 and sum(one.num_gpus for one in sets) <= pool.gpus_per_node
    )


def _nodes(one: WorkerSet, gpus_per_node: int) -> float:
    """Nodes, or the share of one, that a set takes."""
    if one.kind.num_devices >= gpus_per_node:
        return one.num * -(-one.kind.num_devices // gpus_per_node)
    per_node = gpus_per_node // one.kind.num_devices
    whole, rest = divmod(one.num, per_node)
    return whole + rest * one.kind.num_devices / gpus_per_node


@dataclass(frozen=True, slots=True)
class Rules:
    """How workers batch, by role, and what is between them, by GPU."""

    limits: Mapping[Role, BatchLimits]
    networks: Mapping[str, Network]
