"""One unit of a layout as the simulator takes it: groups of workers on their nodes, and the network between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from halfmoon.plan.layout import Layout, WorkerKind, WorkerSet
from halfmoon.plan.node_pools import Fleet
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.goodput import Trial
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, Network, WorkerGroup
from halfmoon.sim.cluster.contention import NO_CONTENTION, Contention
from halfmoon.sim.cluster.kv_codecs import KV_CODECS
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile


def layout_trial(question: PlanningProblem, known: Mapping[WorkerKind, LatencyModel], layout: Layout) -> Trial:
    """One unit of a layout under the question's requests."""
    return Trial(unit_spec(question, known, layout), question.workload, question.goal, question.seed)


def unit_spec(question: PlanningProblem, known: Mapping[WorkerKind, LatencyModel], layout: Layout) -> ClusterSpec:
    """Without the requests."""
    fleet = question.fleet
    groups = [
        WorkerGroup(
            one.role,
            one.num,
            known[one.kind],
            question.rules.limits[one.role],
            workers_per_node=workers_per_node(layout, one, fleet),
            first_node=0 if layout.is_paired else None,
            price_per_hour=fleet.pool(one.kind.gpu).gpu.price_per_hour * one.kind.num_devices,
        )
        for one in layout.sets
    ]
    measured = [one for gpu in layout.gpus if isinstance(one := question.sources[gpu], MeasuredProfile)]
    return ClusterSpec(
        tuple(groups),
        layout_network(question, layout),
        targets=question.goal.targets,
        contention=Contention(**measured[0].contention) if measured else NO_CONTENTION,
        request_s=max((one.request_s for one in measured), default=0.0),
        answer_s=max((one.answer_s for one in measured), default=0.0),
    )


def workers_per_node(layout: Layout, one: WorkerSet, fleet: Fleet) -> int:
    """Of a set. One that is not paired has nodes of its own."""
    return one.num if layout.is_paired else max(fleet.pool(one.kind.gpu).gpus_per_node // one.kind.num_devices, 1)


def layout_network(question: PlanningProblem, layout: Layout) -> Network:
    """Between its workers, with its codec: between different GPUs it is as fast as the slower ends."""
    codec = KV_CODECS[layout.codec]
    all_ends = [question.rules.networks[gpu] for gpu in layout.gpus]
    return replace(
        all_ends[0],
        bytes_per_s=min(one.bytes_per_s for one in all_ends),
        node_bytes_per_s=min(one.node_bytes_per_s for one in all_ends),
        latency_s=max(one.latency_s for one in all_ends),
        kv_ratio=codec.ratio,
        encode_bytes_per_s=codec.encode_bytes_per_s,
        decode_bytes_per_s=codec.decode_bytes_per_s,
    )
