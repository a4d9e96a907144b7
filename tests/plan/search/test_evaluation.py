"""What is estimated is about what policies hold, and what they are asked about in the end."""

from __future__ import annotations

import pytest

from halfmoon.plan.search.evaluation import estimated_per_s, held_goodput, verified_per_s
from halfmoon.plan.search.goodput import Goal, Trial, holds
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, SloTargets, WorkerGroup
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths

MODEL = DistServeCoefficients("opt-13b").model("a100-80g", 1, 1)
WORKLOAD = synthetic_workload(named_lengths("chat"), 200, 1.0, seed=0, most_tokens=2048)
GOAL = Goal(SloTargets(0.3, 0.1))


def trial(num: int) -> Trial:
    return Trial(ClusterSpec((WorkerGroup("prefill", num, MODEL), WorkerGroup("decode", 1, MODEL))), WORKLOAD, GOAL)


def test_one_question_to_policies_is_enough_where_the_estimate_is_right() -> None:
    estimate_per_s = estimated_per_s(trial(2), 1.0, 1)
    assert estimate_per_s is not None
    asked_per_s = verified_per_s(trial(2), estimate_per_s)
    assert asked_per_s < estimate_per_s
    bisection = held_goodput(trial(2), asked_per_s, 1, 400, 1.06, 0.0, asked_per_s)
    assert bisection is not None
    assert bisection.value == asked_per_s
    assert bisection.result.attainment.joint >= GOAL.attainment
    assert not holds(trial(2), 1.15 * estimate_per_s)


def test_what_cannot_be_among_the_best_is_not_estimated_further() -> None:
    estimate_per_s = estimated_per_s(trial(1), 1.0, 1)
    assert estimate_per_s is not None
    assert estimated_per_s(trial(1), 1.0, 1, 1.2 * estimate_per_s) is None
    assert estimated_per_s(trial(1), 1.0, 1, estimate_per_s) == pytest.approx(estimate_per_s, rel=0.1)


def test_units_share_the_rate() -> None:
    one, two = (estimated_per_s(trial(1), float(num), num) for num in (1, 2))
    assert one is not None
    assert two == pytest.approx(2 * one)
    assert verified_per_s(trial(1), 5.0) == 5.0  # there is one way to go: that is exact
