"""Interference between workers of one host, fitted so that a simulation reproduces the measured latencies. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, Network, WorkerGroup
from halfmoon.sim.cluster.contention import Contention, Work
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile, MeasuredSlowdown
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.workload import Workload

_MOST = 4.0  # times as long
_HALVINGS = 8
_ROUNDS = 3  # slower prompts delay decodes, and the other way round
_WORKS: tuple[Work, Work] = ("prefill", "decode")


class ServedMeans(NamedTuple):
    """Mean latencies of served requests, in seconds."""

    ttft_s: float
    tpot_s: float


def fitted_slowdowns(
    profile: MeasuredProfile, roles: Sequence[Role], workload: Workload, served: ServedMeans
) -> list[MeasuredSlowdown]:
    """Fits the slowdown of prompts and of steps beside any colocated work; never below 1.

    `roles` lists all workers of the host. `served` has the workload's measured latencies; they include the cost of the
    gateway and of clients on the same cores.
    """
    spec = _cluster(profile, roles)
    prefill = decode = 1.0

    def ttft_s(slowdown: float) -> float:
        return _means(spec, workload, slowdown, decode).ttft_s

    def tpot_s(slowdown: float) -> float:
        return _means(spec, workload, prefill, slowdown).tpot_s

    for _ in range(_ROUNDS):
        prefill = _matching(ttft_s, served.ttft_s)
        decode = _matching(tpot_s, served.tpot_s)
    fitted = {"prefill": prefill, "decode": decode}
    return [
        MeasuredSlowdown(work=work, neighbour=its, slowdown=fitted[work])
        for work in _WORKS
        for its in _WORKS
        if _meet(roles, work, its)
    ]


def _means(spec: ClusterSpec, workload: Workload, prefill: float, decode: float) -> ServedMeans:
    result = simulate(replace(spec, contention=Contention(prefill, prefill, decode, decode)), workload)
    return ServedMeans(float(np.nanmean(result.ttft_s)), float(np.nanmean(result.tpot_s)))


def _matching(seconds_with: Callable[[float], float], seconds: float) -> float:
    """The slowdown that reproduces `seconds`, or the nearest one."""
    low, high = 1.0, _MOST
    if seconds_with(low) >= seconds:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds_with(middle) < seconds else (low, middle)
    return (low + high) / 2


def _cluster(profile: MeasuredProfile, roles: Sequence[Role]) -> ClusterSpec:
    latency = profile.model(None, profile.tensor_parallel, profile.pipeline_parallel)
    groups = [
        WorkerGroup(role, roles.count(role), latency, profile.batch_limits, workers_per_node=len(roles), first_node=0)
        for role in dict.fromkeys(roles)
    ]
    return ClusterSpec(
        tuple(groups), Network(**profile.network), request_s=profile.request_s, answer_s=profile.answer_s
    )


def _meet(roles: Sequence[Role], work: Work, neighbour: Work) -> bool:
    """Whether one worker can do `work` while another does `neighbour`."""
    able = [[at for at, role in enumerate(roles) if role in (one, "both")] for one in (work, neighbour)]
    return any(one != other for one in able[0] for other in able[1])
