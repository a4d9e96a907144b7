"""One unit of a layout for the simulator: groups of workers on their nodes, and the network between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from halfmoon.plan.layout import Layout, WorkerKind, WorkerSet
from halfmoon.plan.node_pools import Fleet
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.goodput import Trial
from halfmoon.policy.forecast.restore_plan import LAYER_PASSES
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, Network, WorkerGroup
from halfmoon.sim.cluster.contention import NO_CONTENTION, Contention
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile


def layout_trial(problem: PlanningProblem, models: Mapping[WorkerKind, LatencyModel], layout: Layout) -> Trial:
    """One unit of a layout under the problem's requests."""
    return Trial(unit_spec(problem, models, layout), problem.workload, problem.goal, problem.seed)


def unit_spec(problem: PlanningProblem, models: Mapping[WorkerKind, LatencyModel], layout: Layout) -> ClusterSpec:
    """The cluster of one unit."""
    fleet = problem.fleet
    groups = [
        WorkerGroup(
            workers.role,
            workers.num,
            models[workers.kind],
            problem.rules.limits[workers.role],
            workers_per_node=workers_per_node(layout, workers, fleet),
            first_node=0 if layout.is_paired else None,
            price_per_hour=fleet.pool(workers.kind.gpu).gpu.price_per_hour * workers.kind.num_devices,
            layer_passes=layer_passes(workers.role, layout.prefill_degree),
        )
        for workers in layout.sets
    ]
    measured = [one for gpu in layout.gpus if isinstance(one := problem.sources[gpu], MeasuredProfile)]
    return ClusterSpec(
        tuple(groups),
        layout_network(problem, layout),
        targets=problem.goal.targets,
        contention=Contention(**measured[0].contention) if measured else NO_CONTENTION,
        request_s=max((profile.request_s for profile in measured), default=0.0),
        answer_s=max((profile.answer_s for profile in measured), default=0.0),
        conditional=problem.conditional,
        kv_policy=problem.kv_policy,
        max_prefill_degree=layout.prefill_degree,
    )


def layer_passes(role: Role, prefill_degree: int) -> int:
    """Parts in which layers arrive at a worker of the role: some at prefill workers that share prompts, else none."""
    return LAYER_PASSES if role == "prefill" and prefill_degree > 1 else 0


def workers_per_node(layout: Layout, workers: WorkerSet, fleet: Fleet) -> int:
    """Workers of a set on each node. A set that is not paired has nodes of its own."""
    return (
        workers.num
        if layout.is_paired
        else max(fleet.pool(workers.kind.gpu).gpus_per_node // workers.kind.num_devices, 1)
    )


def layout_network(problem: PlanningProblem, layout: Layout) -> Network:
    """The network of a layout, with its codec. Between different GPUs it is as fast as the slower end."""
    all_ends = [problem.rules.networks[gpu] for gpu in layout.gpus]
    return replace(
        all_ends[0],
        bytes_per_s=min(network.bytes_per_s for network in all_ends),
        node_bytes_per_s=min(network.node_bytes_per_s for network in all_ends),
        latency_s=max(network.latency_s for network in all_ends),
        codec=layout.codec,
    )
