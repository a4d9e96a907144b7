"""Simulated workers of unequal devices in one cluster: the live rules decide which of them compute a prompt."""

from __future__ import annotations

import numpy as np

from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.placement.device_rules import DeviceRule
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, WorkerGroup
from halfmoon.sim.latency_sources.worker_profile import coefficients
from halfmoon.sim.result import SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.workload import Workload

STEP = StepModel(0.01, 1e-4, 0.0)
QUICK = coefficients("gpu", PrefillModel(0.01, 1e-4, 0.0), STEP, 200_000, 1024)
SLOW = coefficients("cpu", PrefillModel(0.001, 1e-3, 0.0), STEP, 200_000, 1024)
LIMITS = BatchLimits(max_batch_tokens=4096, max_running=64)


def prefilled_on(*rules: str, prompt: int) -> tuple[int, int]:
    """Steps of the GPU's and of the CPU's worker."""
    groups = (
        WorkerGroup("prefill", 1, QUICK, LIMITS, device="cuda"),
        WorkerGroup("prefill", 1, SLOW, LIMITS, device="cpu"),
        WorkerGroup("decode", 1, QUICK, LIMITS, device="cuda"),
    )
    spec = ClusterSpec(groups, devices=tuple(map(DeviceRule.parse, rules)))
    ones = np.ones(40, dtype=np.int64)
    found: SimResult = simulate(spec, Workload(np.linspace(0.0, 0.8, 40), prompt * ones, 5 * ones))
    assert found.is_completed.all()
    gpu, cpu, _ = found.workers.num_steps
    return int(gpu), int(cpu)


def test_both_compute_what_they_begin_sooner() -> None:
    gpu, cpu = prefilled_on(prompt=200)
    assert gpu > cpu
    assert prefilled_on(prompt=5)[1] > 0


def test_a_rule_leaves_the_slow_one_idle() -> None:
    assert prefilled_on("cpu tokens<=4", prompt=5)[1] == 0
