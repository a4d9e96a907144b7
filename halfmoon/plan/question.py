"""What a plan is asked for: model, hardware, traffic and targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfmoon.errors import InvalidRequest
from halfmoon.plan.goodput import Goal
from halfmoon.plan.layout import Rules
from halfmoon.policy.cluster_view import Role
from halfmoon.sim.cluster import BatchLimits, Network
from halfmoon.sim.hardware import Device
from halfmoon.sim.latency import LatencySource
from halfmoon.sim.profile import MeasuredProfile
from halfmoon.sim.workload import Workload

Objective = Literal["gpus", "goodput-per-gpu", "goodput-per-dollar"]
Affinity = Literal["auto", "high", "low"]


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Raises InvalidRequest for what makes no sense.

    - rate_per_s: that the layout has to hold; None: layouts are compared at the most that each holds.
    - affinity: high: KV may go from node to node (DistServe, algorithm 1); low: it stays within a node (algorithm 2).
    """

    source: LatencySource
    gpu: Device
    num_nodes: int
    gpus_per_node: int
    workload: Workload
    goal: Goal
    rules: Rules
    objective: Objective = "goodput-per-gpu"
    rate_per_s: float | None = None
    affinity: Affinity = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_nodes, self.gpus_per_node) < 1:
            raise InvalidRequest("there has to be at least one node with one GPU", param="nodes")
        if self.rate_per_s is not None and not self.rate_per_s > 0:
            raise InvalidRequest(f"the rate must be above 0 per second, got {self.rate_per_s:g}", param="rate")
        if self.objective == "gpus" and self.rate_per_s is None:
            raise InvalidRequest("fewest GPUs for which rate? give --rate", param="rate")
        if not 0 < self.goal.attainment <= 1:
            raise InvalidRequest(
                f"attainment is a share, above 0 and at most 1, got {self.goal.attainment:g}", param="attainment"
            )
        for name in ("ttft_s", "tpot_s"):
            target_s = getattr(self.goal.targets, name)
            if target_s is None or not target_s > 0:
                raise InvalidRequest(f"a plan needs a target above 0 for {name[:4].upper()}", param=name[:4])
        if self.workload.rate_per_s <= 0:
            raise InvalidRequest("the workload needs requests at two different times at least", param="workload")

    @property
    def num_gpus(self) -> int:
        """That there are."""
        return self.num_nodes * self.gpus_per_node


def default_rules(gpu: Device, gpus_per_node: int, source: LatencySource, max_running: int = 256) -> Rules:
    """The engine's batching, and the catalogue's links or the profile's measured one."""
    link = source.link if isinstance(source, MeasuredProfile) else None
    network = (
        Network(gpu.network_bytes_per_s * gpus_per_node, node_bytes_per_s=gpu.link_bytes_per_s)
        if link is None
        else Network(link[0], link[1], link[0])
    )
    limits = BatchLimits(max_running=max_running)
    roles: tuple[Role, ...] = ("prefill", "decode", "both")
    return Rules(dict.fromkeys(roles, limits), network)
