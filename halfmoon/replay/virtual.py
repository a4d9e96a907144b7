"""A replay on a fake clock: the simulator's cluster with the same policies, instead of processes."""

from __future__ import annotations

import math
from collections.abc import Callable

from halfmoon.policy.admission.refusal import AdmissionMode
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.replay.outcome import End, Outcome, ReplayTargets
from halfmoon.sim.cluster import cluster_spec as cluster
from halfmoon.sim.latency_sources.worker_profile import WorkerProfile
from halfmoon.sim.result import OUTCOMES, SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.workload import Workload

_ENDS: dict[str, End] = {"completed": "answered", "refused": "refused", "failed": "failed"}


def simulated(
    workload: Workload,
    profile: WorkerProfile,
    counts: tuple[int, int],
    modes: tuple[PlacementMode, AdmissionMode],
    targets: ReplayTargets,
    on_progress: Callable[[int, int], None],
) -> list[Outcome]:
    """The outcome of each request on `counts` prefill and decode workers of one profile."""
    spec = cluster_spec(profile, counts, modes, targets)
    return _outcomes(simulate(spec, workload, on_progress=on_progress), workload)


def cluster_spec(
    profile: WorkerProfile, counts: tuple[int, int], modes: tuple[PlacementMode, AdmissionMode], targets: ReplayTargets
) -> cluster.ClusterSpec:
    """The cluster that `halfmoon up --engine sim` would start."""
    limits = cluster.BatchLimits(
        profile.max_batch_tokens,
        profile.chunk_tokens,
        profile.max_running,
        follows_targets=profile.follows_targets,
        nests_steps=profile.nests_steps,
    )
    prefill = cluster.WorkerGroup("prefill", counts[0], profile.latency, limits)
    decode = cluster.WorkerGroup("decode", counts[1], profile.latency, limits)
    return cluster.ClusterSpec(
        (prefill, decode),
        cluster.Network(profile.link_bytes_per_s or math.inf, profile.link_latency_s),
        modes[0],
        admission=modes[1],
        targets=cluster.SloTargets(ttft_s=_limit(targets.ttft_s), tpot_s=_limit(targets.tbt_s)),
    )


def _limit(target_s: float) -> float | None:
    return target_s if math.isfinite(target_s) else None


def _outcomes(result: SimResult, workload: Workload) -> list[Outcome]:
    return [
        Outcome(
            _ENDS[OUTCOMES[result.outcome[index]]],
            ttft_s=float(result.ttft_s[index]),
            tbt_s=float(0.0 if math.isnan(result.tpot_s[index]) else result.tpot_s[index]),
            num_tokens=int(workload.output_tokens[index]),
            num_prompt_tokens=int(workload.prompt_tokens[index]),
            num_cached_tokens=int(result.cached_tokens[index]),
        )
        for index in range(len(workload))
    ]
