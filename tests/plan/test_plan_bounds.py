"""No simulated goodput exceeds what the latency models allow, and bisection finds the limit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.plan.layout import Parallelism, WorkerKind
from halfmoon.plan.node_pools import read_fleet
from halfmoon.plan.problem import PlanningProblem, default_rules
from halfmoon.plan.search.bounds import decode_bound_per_s, prefill_bound_per_s
from halfmoon.plan.search.feasible import Option
from halfmoon.plan.search.goodput import Goal, Trial, goodput_per_s, holds, holds_at_first
from halfmoon.plan.search.phases import phase_trial
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, SloTargets, TbtOf, WorkerGroup
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.latency_sources.sequence_parallel import parallel_model
from halfmoon.sim.latency_sources.worker_profile import coefficients
from halfmoon.sim.result import Criterion
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths

SOURCES, FLEET = {"a100-80g": DistServeCoefficients("opt-13b")}, read_fleet("a100-80g", 1, 8, {})


def phase(
    role: Role, parallelism: Parallelism, lengths: str, ttft_s: float, tpot_s: float, share: float
) -> tuple[Trial, Option]:
    """One worker of a role as the search simulates it, and its bound."""
    workload = synthetic_workload(named_lengths(lengths), 200, 1.0, seed=0, most_tokens=2048)
    goal = Goal(SloTargets(ttft_s, tpot_s), share)
    problem = PlanningProblem(SOURCES, FLEET, workload, goal, default_rules(FLEET, SOURCES))
    model, kind = parallel_model(SOURCES["a100-80g"], "a100-80g", *parallelism), WorkerKind("a100-80g", parallelism)
    bound_per_s = prefill_bound_per_s if role == "prefill" else decode_bound_per_s
    option = Option(role, kind, bound_per_s(model, workload, goal, problem.rules.limits[role]))
    return phase_trial(problem, {kind: model}, option), option


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["prefill", "decode"]),
    st.sampled_from([Parallelism(1, 1), Parallelism(2, 1), Parallelism(1, 2)]),
    st.sampled_from(["code", "chat", "in=512,out=64"]),
    st.floats(0.1, 2.0),
    st.floats(0.03, 0.2),
    st.floats(0.5, 0.99),
)
def test_nothing_simulated_exceeds_its_bound(
    role: Role, parallelism: Parallelism, lengths: str, ttft_s: float, tpot_s: float, share: float
) -> None:
    trial, option = phase(role, parallelism, lengths, ttft_s, tpot_s, share)
    rate_per_s = 1.05 * option.bound.most_per_s  # a cluster that falls behind by less is held to keep up
    if rate_per_s:
        assert not holds(trial, rate_per_s) or option.bound.most_per_s >= 1e6


def test_steps_that_take_no_time_bound_nothing() -> None:
    instant = coefficients("instant", PrefillModel(0, 0, 0), StepModel(0, 0, 0), 100_000, 1.0)
    workload = synthetic_workload(named_lengths("chat"), 20, 1.0, seed=0)
    bound = decode_bound_per_s(instant, workload, Goal(SloTargets(0.2, 0.1), 0.9), BatchLimits())
    assert bound.most_per_s > 1000


@pytest.mark.parametrize("guess_per_s", [0.05, 3.0, 500.0])
def test_the_edge_is_found_from_any_guess(guess_per_s: float) -> None:
    trial, _ = phase("prefill", Parallelism(1, 1), "in=512,out=64", 0.2, 0.1, 0.9)
    found = goodput_per_s(trial, guess_per_s)
    assert holds(trial, found)
    assert not holds(trial, found * 1.02)


def test_a_target_below_an_idle_workers_time_is_never_held() -> None:
    trial, _ = phase("prefill", Parallelism(1, 1), "in=512,out=64", 0.05, 0.1, 0.9)
    assert goodput_per_s(trial, 1.0) == 0.0


def test_a_decode_worker_that_misses_tpot_alone_is_bounded_by_nothing_at_all() -> None:
    _, option = phase("decode", Parallelism(1, 1), "in=512,out=64", 0.2, 0.01, 0.9)
    assert option.bound.most_per_s == 0.0


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["joint", "marginal"]),
    st.floats(0.05, 0.4),
    st.floats(0.02, 0.06),
    st.floats(0.02, 0.1),
    st.sampled_from(["longest", "longest-tenth"]),
    st.floats(0.5, 1.0),
    st.floats(0.5, 20.0),
)
def test_a_simulation_that_gives_up_says_what_a_whole_one_says(
    criterion: Criterion, ttft_s: float, tpot_s: float, tbt_s: float, of: TbtOf, share: float, rate_per_s: float
) -> None:
    model = SOURCES["a100-80g"].model("a100-80g", 1, 1)
    workload = synthetic_workload(named_lengths("code"), 60, 1.0, seed=0, most_tokens=2048)
    goal = Goal(SloTargets(ttft_s, tpot_s, tbt_s, of), share, criterion)
    trial = Trial(ClusterSpec((WorkerGroup("both", 1, model),)), workload, goal)
    whole = simulate(trial.spec, workload.at_rate(rate_per_s))
    assert holds_at_first(trial, rate_per_s) == (whole.attainment(goal.targets).value(criterion) >= share)
