"""What a run shows of a held rate agrees with whether it is held, and waits for almost everybody."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.plan.search.evaluation import estimated_evaluation
from halfmoon.plan.search.goodput import (
    Goal,
    Trial,
    about_holds,
    fails_at_first,
    goodput_per_s,
    held_at,
    holds,
    may_hold_at_first,
    steady_at,
)
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, SloTargets, WorkerGroup
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths
from halfmoon.sim.workloads.workload import Prefixes

MODEL = DistServeCoefficients("opt-13b").model("a100-80g", 1, 1)
WORKLOAD = synthetic_workload(named_lengths("chat"), 200, 1.0, seed=0, most_tokens=2048)
GOAL = Goal(SloTargets(0.3, 0.1))


def trial(*groups: WorkerGroup, goal: Goal = GOAL) -> Trial:
    return Trial(ClusterSpec(groups), WORKLOAD, goal)


ONE = trial(WorkerGroup("prefill", 1, MODEL), WorkerGroup("decode", 1, MODEL))


@settings(max_examples=12, deadline=None)
@given(st.floats(0.5, 6.0), st.sampled_from([0.7, 0.9, 0.99]))
def test_what_is_shown_is_of_a_rate_that_is_held(rate_per_s: float, share: float) -> None:
    asked = Trial(ONE.spec, WORKLOAD, Goal(GOAL.targets, share))
    found = held_at(asked, rate_per_s)
    assert (found is not None) == holds(asked, rate_per_s)
    if found is not None:
        assert len(found.start_s) == len(WORKLOAD)
        assert found.attainment(asked.goal.targets).value(asked.goal.criterion) >= share


@pytest.mark.parametrize("tbt_s", [None, 0.5])
def test_the_last_ones_count_as_they_are(tbt_s: float | None) -> None:
    """The pass of a run that goes on is the same one; but for two of its requests all of it was over before."""
    goal = Goal(SloTargets(0.3, 0.1, tbt_s))
    found = held_at(trial(WorkerGroup("both", 1, MODEL), goal=goal), 0.5)
    assert found is not None
    whole = simulate(ClusterSpec((WorkerGroup("both", 1, MODEL),)), WORKLOAD.at_rate(0.5).repeated(4))
    passes = [whole.rows(at * 200, (at + 1) * 200) for at in range(4)]
    same = next(one for one in passes if np.isclose(one.start_s[0], found.start_s[0]))
    assert (found.end_s != same.end_s).sum() <= 2
    np.testing.assert_array_equal(found.ttft_s, same.ttft_s)
    np.testing.assert_allclose(found.tpot_s, same.tpot_s, rtol=0.2)
    assert found.attainment(goal.targets) == same.attainment(goal.targets)


def test_an_estimate_is_near_what_policies_hold() -> None:
    asked = trial(WorkerGroup("both", 2, MODEL), goal=Goal(SloTargets(0.4, 0.1)))
    about = goodput_per_s(asked, 2.0, 1.05, about_holds)
    assert holds(asked, about / 1.15)
    assert not holds(asked, about * 1.2)


@pytest.mark.parametrize("roles", [("both",), ("prefill", "decode")])
def test_no_estimate_rules_out_what_policies_hold(roles: tuple[Role, ...]) -> None:
    asked = replace(trial(*(WorkerGroup(role, 2, MODEL) for role in roles)), workload=WORKLOAD.first(80))
    most = goodput_per_s(asked, 2.0, 1.1)
    assert estimated_evaluation(asked, most, 1) is not None
    assert may_hold_at_first(asked, most)
    assert estimated_evaluation(asked, 1.5 * most, 1) is None


def test_what_nothing_estimates_is_left_to_policies() -> None:
    """Who knows no prefixes says nothing about requests that share them."""
    shared = replace(WORKLOAD, prefixes=Prefixes(64, np.zeros(200, np.int64), np.arange(201)))
    asked = replace(trial(WorkerGroup("both", 2, MODEL)), workload=shared)
    assert not asked.has_estimates
    assert not may_hold_at_first(asked, 1e6)


def test_a_first_look_is_not_taken_at_the_larger_part() -> None:
    assert not fails_at_first(ONE, 1000.0, 100)
    assert fails_at_first(ONE, 1000.0, 50)
    assert not fails_at_first(ONE, 0.5, 50)
    assert not steady_at(ONE, 1000.0).keeps_up


def test_what_does_not_even_fill_a_cluster_is_as_estimated() -> None:
    """Where there is a choice; else there is nothing to estimate."""
    choosing = trial(WorkerGroup("both", 2, MODEL))
    over, held = steady_at(choosing, 50.0), steady_at(choosing, 1.0)
    assert (over.counts, over.keeps_up) == (False, False)
    assert (held.counts, held.keeps_up) == (True, True)
    assert len(over.result.start_s) == len(held.result.start_s) == len(WORKLOAD)
    assert steady_at(ONE, 50.0).counts
