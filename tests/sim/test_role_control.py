"""Roles change in a simulation: what was accepted finishes, running answers move, and the autopilot follows traffic."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.scaling.autopilot import Autopilot
from halfmoon.policy.scaling.observation import Observation, Split
from halfmoon.policy.scaling.rules import ScalingRules
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Network, SloTargets, WorkerGroup
from halfmoon.sim.latency_sources.worker_profile import coefficients
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.workload import Workload

LATENCY = coefficients("test", PrefillModel(0.02, 4e-4, 0.0), StepModel(0.06, 1.5e-3, 2e-7), 200_000, 131_072)
LIMITS = BatchLimits(max_batch_tokens=4096, max_running=64)
TARGETS = SloTargets(ttft_s=4.0, tpot_s=0.1)


def cluster(split: Split) -> ClusterSpec:
    roles: tuple[tuple[Role, int], ...] = (("prefill", split.prefill), ("decode", split.decode))
    groups = tuple(WorkerGroup(role, count, LATENCY, LIMITS) for role, count in roles)
    return ClusterSpec(groups, Network(latency_s=1e-3), targets=TARGETS)


def steady(rate_per_s: float, prompt: int, output: int, seconds: float) -> Workload:
    start_s = np.arange(0.0, seconds, 1 / rate_per_s)
    ones = np.ones(len(start_s), dtype=np.int64)
    return Workload(start_s, prompt * ones, output * ones)


class Timed:
    """Changes given workers at given times."""

    every_s = 0.5
    window_s = 4

    def __init__(self, *changes: tuple[float, str, Role]) -> None:
        self._left = list(changes)
        self.splits: list[Split] = []
        self.running: list[dict[str, int]] = []

    def changes(self, seen: Observation, now_s: float) -> Iterable[tuple[str, Role]]:
        self.splits.append(seen.split)
        self.running.append({worker.worker_id: worker.num_running for worker in seen.workers})
        due = [change for change in self._left if change[0] <= now_s]
        self._left = [change for change in self._left if change[0] > now_s]
        return [(name, role) for _, name, role in due]


class Piloted:
    """The autopilot, and its splits."""

    every_s = 0.5

    def __init__(self, rules: ScalingRules) -> None:
        self._autopilot = Autopilot(rules)
        self.window_s = rules.window_s
        self.splits: list[Split] = []

    def changes(self, seen: Observation, now_s: float) -> Iterable[tuple[str, Role]]:
        self.splits.append(seen.split)
        decision = self._autopilot.decide(seen, now_s)
        return [(decision.worker_id, decision.role)] if decision.action == "change_role" and decision.role else []


def test_running_answers_leave_a_worker_that_is_to_prefill() -> None:
    controller = Timed((10.0, "decode-2", "prefill"))
    result = simulate(cluster(Split(2, 2)), steady(2.0, 200, 150, 30.0), controller=controller)
    assert result.is_completed.all()
    assert controller.splits[0] == Split(2, 2)
    assert controller.splits[-1] == Split(3, 1)
    before, after = controller.running[19], controller.running[30]
    assert before["decode-2"] > 5
    assert after["decode-2"] == 0, "they moved, long before they would have ended"
    assert after["decode-3"] > before["decode-3"]
    assert np.nanmax(result.longest_gap_s) < 1.0, "none was computed again"


def test_what_a_prefill_worker_had_accepted_finishes_there() -> None:
    controller = Timed((5.0, "prefill-0", "decode"))
    result = simulate(cluster(Split(2, 1)), steady(3.0, 1500, 20, 20.0), controller=controller)
    assert result.is_completed.all()
    assert controller.splits[-1] == Split(1, 2)


def test_a_controller_that_changes_nothing_changes_nothing() -> None:
    work = steady(3.0, 800, 40, 30.0)
    plain = simulate(cluster(Split(2, 2)), work, policies="always")
    watched = simulate(cluster(Split(2, 2)), work, controller=Timed())
    assert np.array_equal(plain.end_s, watched.end_s)
    assert np.array_equal(plain.ttft_s, watched.ttft_s)


@pytest.mark.parametrize(("prompt", "output", "rate", "side"), [(3000, 10, 3.0, "prefill"), (100, 150, 6.5, "decode")])
def test_the_autopilot_gives_workers_to_the_phase_that_needs_them(
    prompt: int, output: int, rate: float, side: Role
) -> None:
    rules = ScalingRules(dwell_s=5.0, between_s=0.5, settle_s=10.0)
    work, piloted = steady(rate, prompt, output, 90.0), Piloted(rules)
    result = simulate(cluster(Split(3, 3)), work, controller=piloted)
    fixed = simulate(cluster(Split(3, 3)), work, policies="always")
    assert piloted.splits[-1].of(side) > 3
    assert result.is_completed.all()
    assert result.attainment(TARGETS).joint > fixed.attainment(TARGETS).joint
