"""The simulator's entry, called by `halfmoon simulate`: simulates one cluster under one workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.errors import InvalidRequest
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, SloTargets, TbtOf
from halfmoon.sim.cluster.spec_file import read_cluster
from halfmoon.sim.latency_sources.latency_model import LatencySource
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.report import request_rows, simulation_summary
from halfmoon.sim.result import Criterion, SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.drawn_workload import ArrivalProcess
from halfmoon.sim.workloads.named_workload import named_workload
from halfmoon.sim.workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class PointRequest:
    """The options of `halfmoon simulate`. A target that is None comes from the cluster's file."""

    cluster: str  # a path
    workload: str
    latency: str | None = None
    rate_per_s: float | None = None
    num_requests: int | None = None
    process: ArrivalProcess = "poisson"
    cv: float = 1.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    tbt_s: float | None = None
    tbt_of: TbtOf | None = None
    attainment: float = 0.9
    criterion: Criterion = "joint"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """A request and its simulation."""

    spec: ClusterSpec
    workload: Workload
    targets: SloTargets
    request: PointRequest
    result: SimResult

    def summary(self, *, with_requests: bool) -> dict[str, Any]:
        """Plain values, as in `sim.report`."""
        request = self.request
        result = simulation_summary(self.spec, self.result, self.targets, request.attainment, request.criterion)
        return {**result, "requests": request_rows(self.workload, self.result)} if with_requests else result


def simulate_point(
    request: PointRequest,
    on_progress: Callable[[int, int], None] | None = None,
    source_of: Callable[[str], LatencySource] = latency_source,
) -> Point:
    """Simulates a request. `source_of` is the same as in `read_cluster`. Raises InvalidRequest for invalid options."""
    if not 0 <= request.attainment <= 1:
        raise InvalidRequest(f"attainment is a share, at most 1, got {request.attainment:g}", param="attainment")
    spec = read_cluster(Path(request.cluster), request.latency, source_of)
    kept = spec.targets
    targets = SloTargets(
        kept.ttft_s if request.ttft_s is None else request.ttft_s,
        kept.tpot_s if request.tpot_s is None else request.tpot_s,
        kept.tbt_s if request.tbt_s is None else request.tbt_s,
        request.tbt_of or kept.tbt_of,
    )
    workload = named_workload(
        request.workload, request.rate_per_s, request.num_requests, request.process, request.cv, request.seed
    )
    return Point(spec, workload, targets, request, simulate(spec, workload, request.seed, on_progress))
