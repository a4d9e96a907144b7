"""A planning problem: model, hardware, traffic and targets, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from halfmoon.errors import InvalidRequest
from halfmoon.plan.layout import Layout, Rules
from halfmoon.plan.node_pools import Fleet, NodePool
from halfmoon.plan.search.goodput import Goal
from halfmoon.policy.placement.conditional import DEFAULT_MODE, MOST_SHARE, ConditionalMode
from halfmoon.policy.view.worker_view import ROLES, Role
from halfmoon.sim.cluster.cluster_spec import BLOCK_TOKENS, BatchLimits, Network
from halfmoon.sim.cluster.kv_codecs import KvCodecName
from halfmoon.sim.latency_sources.latency_model import LatencySource
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile
from halfmoon.sim.latency_sources.model_shape import ModelShape
from halfmoon.sim.worker.kept_kv import KeptKV, policy_of
from halfmoon.sim.workloads.workload import Workload

Objective = Literal["gpus", "price", "goodput-per-gpu", "goodput-per-dollar"]
Affinity = Literal["auto", "high", "low"]

FIRST_REQUESTS = 400
MAX_RUNNING = 256  # sequences of a worker, by default

OF_A_RATE: tuple[Objective, ...] = ("gpus", "price")
"""Objectives that need a rate."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanningProblem:
    """One problem. Raises InvalidRequest for invalid values.

    - sources: the latency source of each GPU of the fleet.
    - rate_per_s: the rate that the layout must sustain; None: layouts are compared by their goodput.
    - affinity: high: KV may cross nodes (DistServe, algorithm 1); low: it stays within a node (algorithm 2).
    - shape: of the model, whose heads and layers the parallelism must divide; None: unknown, not checked.
    - gpus_for: the GPU of a role's workers; other roles may use any GPU.
    - codecs: of KV between nodes, the least lossy first.
    - is_thorough: prune by bounds only, and simulate all requests from the start.
    - conditional: when decode workers compute prompts.
    - host_bytes_per_gpu: host memory for KV that workers which decode may have; 0: none.
    - kv_policy: what is kept of all requests' KV, such as sinks:4+1024; None: all.
    - host_weight_bytes_per_gpu: host memory for weights, which workers have whose GPUs do not hold all; 0: none.
    - max_prefill_degree: most prefill workers that may compute one prompt together; 1: always one.
    """

    sources: Mapping[str, LatencySource]
    fleet: Fleet
    workload: Workload
    goal: Goal
    rules: Rules
    objective: Objective = "goodput-per-gpu"
    rate_per_s: float | None = None
    affinity: Affinity = "auto"
    seed: int = 0
    shape: ModelShape | None = None
    gpus_for: Mapping[Role, str] = field(default_factory=dict)
    codecs: tuple[KvCodecName, ...] = ("raw",)
    is_thorough: bool = False
    conditional: ConditionalMode = DEFAULT_MODE
    host_bytes_per_gpu: int = 0
    host_weight_bytes_per_gpu: int = 0
    kv_policy: str | None = None
    max_prefill_degree: int = 1

    def __post_init__(self) -> None:
        if self.rate_per_s is not None and not 0 < self.rate_per_s < math.inf:
            raise InvalidRequest(
                f"the rate must be above 0 per second, and finite, got {self.rate_per_s:g}", param="rate"
            )
        for of, num_bytes in (("kv", self.host_bytes_per_gpu), ("weights", self.host_weight_bytes_per_gpu)):
            if num_bytes < 0:
                what = of.upper() if of == "kv" else of
                raise InvalidRequest(f"host memory for {what} is 0 bytes at least, got {num_bytes}", param=f"host_{of}")
        if self.max_prefill_degree < 1:
            raise InvalidRequest(
                f"a prompt is computed by 1 prefill worker at least, got {self.max_prefill_degree}",
                param="max_prefill_degree",
            )
        policy_of(self.kv_policy)
        if self.objective in OF_A_RATE and self.rate_per_s is None:
            what = "fewest GPUs" if self.objective == "gpus" else "the lowest price"
            raise InvalidRequest(f"{what} for which rate? give --rate", param="rate")
        if not 0 < self.goal.attainment <= 1:
            raise InvalidRequest(
                f"attainment is a share, above 0 and at most 1, got {self.goal.attainment:g}", param="attainment"
            )
        if self.goal.targets.ttft_s is None or self.goal.targets.tpot_s is None:
            raise InvalidRequest("a plan needs a target for TTFT and one for TPOT", param="targets")
        if len(self.workload) < 2 or not 0 < self.workload.rate_per_s < math.inf:
            raise InvalidRequest("the workload needs requests at two different times at least", param="workload")
        for role, gpu in self.gpus_for.items():
            if gpu not in self.fleet.names:
                raise InvalidRequest(
                    f"the fleet has no {gpu} for {role}: it has {', '.join(self.fleet.names)}", param=f"{role}_gpu"
                )

    @property
    def kept_kv(self) -> KeptKV:
        """What is kept of the requests' KV."""
        return KeptKV(policy_of(self.kv_policy), BLOCK_TOKENS)

    @property
    def kept_share(self) -> float:
        """The most of a decode worker's time that prompts take there by choice."""
        return MOST_SHARE.get(self.conditional, 0.0)

    @property
    def num_first(self) -> int:
        """Requests of a first look."""
        return len(self.workload) if self.is_thorough else FIRST_REQUESTS

    def may_have(self, role: Role, gpu: str) -> bool:
        """Whether workers of the role may use that GPU."""
        return self.gpus_for.get(role, gpu) == gpu

    def cost(self, layout: Layout) -> float:
        """The cost that the objective counts: dollars per hour, or GPUs."""
        if self.objective in ("price", "goodput-per-dollar"):
            return layout.price_per_hour(self.fleet)
        return layout.num_gpus

    def text(self, layout: Layout) -> str:
        """A layout in words, with the names of GPUs if there are several kinds."""
        return layout.text(named=self.fleet.is_mixed)


def default_rules(
    fleet: Fleet,
    sources: Mapping[str, LatencySource],
    max_running: int | None = None,
    network_bytes_per_s: float | None = None,
) -> Rules:
    """Batch limits as measured, or else the engine's, with the given number of sequences; steps nest if all kinds of
    workers do. Networks as given, or else as measured, or else the catalogue's.
    """
    measured = [source for source in sources.values() if isinstance(source, MeasuredProfile)]
    limits = measured[0].batch_limits if measured else BatchLimits(max_running=MAX_RUNNING)
    all_nest = len(measured) == len(sources) and all(source.batch_limits.nests_steps for source in measured)
    limits = replace(limits, nests_steps=all_nest)
    if max_running is not None:
        limits = replace(limits, max_running=max_running)
    networks = {pool.gpu.name: _network(pool, sources[pool.gpu.name], network_bytes_per_s) for pool in fleet.pools}
    return Rules(dict.fromkeys(ROLES, limits), networks)


def _network(pool: NodePool, source: LatencySource, bytes_per_s: float | None) -> Network:
    measured = source.network if isinstance(source, MeasuredProfile) else {}
    if measured:
        return Network(**{**measured, "bytes_per_s": bytes_per_s or measured["bytes_per_s"]})
    port = bytes_per_s or pool.gpu.network_bytes_per_s * pool.gpus_per_node
    return Network(port, node_bytes_per_s=pool.gpu.link_bytes_per_s)
