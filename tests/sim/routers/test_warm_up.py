"""A cluster that is filled by the lightest choice: policies have the passes that count, all of them, and know who is
inside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halfmoon.sim.cluster.cluster_spec import ClusterSpec, SloTargets, WorkerGroup
from halfmoon.sim.cluster.contention import Contention
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.result import SimResult
from halfmoon.sim.routers.choose_router import PolicyUse
from halfmoon.sim.simulation import simulate
from halfmoon.sim.slo_tracker import SloTracker
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths

MODEL = DistServeCoefficients("opt-13b").model("a100-80g", 1, 1)
NUM, NUM_PASSES = 150, 8
PASSES = synthetic_workload(named_lengths("chat"), NUM, 8.0, seed=0, most_tokens=2048).repeated(2 * NUM_PASSES)
TARGETS = SloTargets(0.3, 0.1)
APART = ClusterSpec((WorkerGroup("prefill", 2, MODEL), WorkerGroup("decode", 3, MODEL)))
BOTH = ClusterSpec((WorkerGroup("both", 4, MODEL),))
SLOWED = replace(BOTH, contention=Contention(1.1, 1.1, 1.1, 1.1), request_s=0.01, answer_s=0.01)


def run(spec: ClusterSpec, policies: PolicyUse, most: int = NUM) -> tuple[SloTracker, SimResult]:
    is_warm = policies == "once full"
    misses = SloTracker(TARGETS, "joint", most, NUM_PASSES, NUM, 0.05 * NUM, 0.0, is_filled_first=is_warm)
    return misses, simulate(spec, PASSES, tracker=misses, policies=policies)


@pytest.mark.parametrize("spec", [APART, BOTH, SLOWED])
def test_the_passes_that_count_are_placed_by_policies_alone(spec: ClusterSpec) -> None:
    """Until then all is as without policies, and so are the loads that they find."""
    misses, warm = run(spec, "once full")
    _, lightly = run(spec, "never")
    first, steady = misses.first_pass, misses.steady_pass
    assert misses.is_held
    assert steady == first + 1
    assert misses.stage == "behind"
    begins_s = PASSES.start_s[first * NUM]
    is_over = np.flatnonzero(warm.end_s[: first * NUM] < begins_s)
    np.testing.assert_array_equal(warm.end_s[is_over], lightly.end_s[is_over])
    counting = slice(first * NUM, (steady + 1) * NUM)
    num = min(len(lightly.start_s), counting.stop)
    assert (warm.end_s[counting.start : num] != lightly.end_s[counting.start : num]).mean() > 0.5


@pytest.mark.parametrize("spec", [APART, BOTH, SLOWED])
def test_they_fare_as_where_policies_filled_it(spec: ClusterSpec) -> None:
    def steady(policies: PolicyUse) -> SimResult:
        misses, found = run(spec, policies)
        assert misses.steady_pass is not None
        return found.rows(misses.steady_pass * NUM, (misses.steady_pass + 1) * NUM)

    warm, cold = steady("once full"), steady("as needed")
    assert np.nanmean(warm.tpot_s) == pytest.approx(np.nanmean(cold.tpot_s), rel=0.05)
    assert np.nanmean(warm.ttft_s) == pytest.approx(np.nanmean(cold.ttft_s), rel=0.15)


def test_what_the_lightest_choice_does_not_fill_is_left_to_policies() -> None:
    """No pass counts: neither is it told as held nor is it known that it is not."""
    misses, _ = run(replace(BOTH, groups=(replace(BOTH.groups[0], count=2),)), "once full", most=15)
    assert misses.stage == "filling"
    assert misses.is_decided
    assert not misses.is_held


def test_where_nobody_is_left_between_passes_one_that_counts_is_enough() -> None:
    slowly = replace(PASSES, start_s=100 * PASSES.start_s)
    misses = SloTracker(TARGETS, "joint", NUM, NUM_PASSES, NUM, 0.05 * NUM, 0.0, is_filled_first=True)
    simulate(BOTH, slowly, tracker=misses, policies="once full")
    assert (misses.first_pass, misses.steady_pass) == (1, 1)
