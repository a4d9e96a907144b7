"""Answers leave a busy decode worker in a simulation where the policy says that it pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Failure, Network, WorkerGroup
from halfmoon.sim.latency_sources.worker_profile import coefficients
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.workload import Workload

LATENCY = coefficients("test", PrefillModel(0.001, 1e-5, 0.0), StepModel(0.01, 2e-3, 2e-7), 200_000, 1024)
LIMITS = BatchLimits(max_batch_tokens=4096, max_running=64)


def cluster(**changed: object) -> ClusterSpec:
    """Two decode workers, the second of which comes back when the first has all the answers."""
    groups = (WorkerGroup("prefill", 1, LATENCY, LIMITS), WorkerGroup("decode", 2, LATENCY, LIMITS))
    spec = ClusterSpec(groups, Network(latency_s=1e-3), failures=(Failure(2, 0.0, 5.0),), report_s=0.5)
    return replace(spec, **changed)  # type: ignore[arg-type]


def at_once(num: int, output: int) -> Workload:
    ones = np.ones(num, dtype=np.int64)
    return Workload(np.linspace(1.0, 2.0, num), 200 * ones, output * ones)


def test_half_of_the_answers_leave_for_a_worker_that_came_back() -> None:
    """Each step was as long as for all of them; with the moves it is about half as long."""
    stays, moves = (simulate(cluster(hot_spots=on), at_once(24, 600)) for on in (False, True))
    assert stays.is_completed.all()
    assert moves.is_completed.all()
    assert moves.end_s.max() < 0.75 * stays.end_s.max()
    assert np.nanmax(moves.longest_gap_s) < 0.5, "none was computed again"


def test_nothing_moves_between_about_equal_workers() -> None:
    """The same result, to the last digit."""
    both = (replace(cluster(hot_spots=on), failures=()) for on in (False, True))
    stays, moves = (simulate(spec, at_once(24, 200), policies="always") for spec in both)
    assert np.array_equal(stays.end_s, moves.end_s)


def test_short_rests_stay() -> None:
    stays, moves = (simulate(cluster(hot_spots=on), at_once(24, 70)) for on in (False, True))
    assert np.array_equal(stays.end_s, moves.end_s)
