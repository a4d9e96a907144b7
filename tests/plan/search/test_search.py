"""The search finds what trying every layout finds, by the same simulator and the same rule."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.plan.layout import Layout, Parallelism, WorkerKind, WorkerSet
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.planning import problem_from
from halfmoon.plan.problem import OF_A_RATE, Objective, PlanningProblem
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.search.bounds import RateBound
from halfmoon.plan.search.combinations import Combination
from halfmoon.plan.search.feasible import NoLayout, Option, feasible_models
from halfmoon.plan.search.goodput import Trial, goodput_per_s, holds, holds_at_first, steady_at
from halfmoon.plan.search.phases import least
from halfmoon.plan.search.search import search
from halfmoon.plan.search.search_cheapest import cut
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, WorkerGroup
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths

SAME, MIXED = "a100-80g:1x3", "h100:1x1,a100-80g:1x1"


@cache
def problem(fleet: str, workload: str, objective: Objective, rate_per_s: float | None) -> PlanningProblem:
    """Few requests, and targets that one GPU just meets."""
    return problem_from(
        PlanRequest(
            "llama-3-8b",
            fleet,
            workload,
            0.4,
            0.03,
            num_requests=24,
            rate_per_s=rate_per_s,
            objective=objective,
            is_thorough=objective not in OF_A_RATE,
        )
    )[0]


def everything(problem: PlanningProblem) -> Iterator[Layout]:
    """Whatever fits: workers of one kind, or of one kind for each phase, on one node of each GPU."""
    fleet, kinds = problem.fleet, list(feasible_models(problem))

    def nums(kind: WorkerKind) -> range:
        return range(1, fleet.num_gpus // kind.num_devices + 1)

    both = (Layout((WorkerSet("both", one, num),)) for one in kinds for num in nums(one))
    pairs = (
        Layout((WorkerSet("prefill", first, a), WorkerSet("decode", second, b)), is_paired=first.gpu == second.gpu)
        for first, second in product(kinds, kinds)
        for a, b in product(nums(first), nums(second))
    )
    yield from (one for one in (*both, *pairs) if one.fits(fleet))


def trial_of(problem: PlanningProblem, layout: Layout) -> Trial:
    return layout_trial(problem, feasible_models(problem), layout)


@pytest.mark.parametrize("fleet", [SAME, MIXED])
@pytest.mark.parametrize(
    ("workload", "rates", "objective"), [("in=300,out=60", (8, 25), "gpus"), ("in=900,out=20", (12, 25), "price")]
)
def test_what_holds_a_rate_at_the_lowest_cost_is_found(
    fleet: str, workload: str, rates: tuple[float, ...], objective: Objective
) -> None:
    for rate_per_s in rates:
        asked_for = problem(fleet, workload, objective, rate_per_s)
        costs = {
            is_colocated: min(
                (
                    asked_for.cost(one)
                    for one in everything(asked_for)
                    if one.is_colocated == is_colocated and holds(trial_of(asked_for, one), rate_per_s)
                ),
                default=None,
            )
            for is_colocated in (False, True)
        }
        try:
            with ThreadPoolExecutor(1) as pool:
                found = search(asked_for, pool)
        except NoLayout:
            assert costs == {False: None, True: None}
            continue
        kinds = {False: found.disaggregated, True: found.colocated}
        assert {what: one and asked_for.cost(one.layout) for what, one in kinds.items()} == costs
        assert asked_for.cost(found.best[0].layout) == min(one for one in costs.values() if one is not None)
        assert holds(trial_of(asked_for, found.best[0].layout), rate_per_s)


@pytest.mark.parametrize("fleet", [SAME, MIXED])
@pytest.mark.parametrize(
    ("workload", "objective"), [("in=900,out=20", "goodput-per-gpu"), ("in=300,out=60", "goodput-per-dollar")]
)
def test_what_holds_most_for_its_cost_is_found(fleet: str, workload: str, objective: Objective) -> None:
    asked_for = problem(fleet, workload, objective, None)
    with ThreadPoolExecutor(1) as pool:
        found = search(asked_for, pool)
    for one in (found.disaggregated, found.colocated):
        assert one is not None
        trial = trial_of(asked_for, one.layout)
        assert holds(trial, one.goodput_per_s)
        better = 1.06 * one.goodput_per_s / asked_for.cost(one.layout)  # the search is within 5 %
        for layout in everything(asked_for):
            if layout.is_colocated == one.layout.is_colocated:
                assert not holds(trial_of(asked_for, layout), better * asked_for.cost(layout)), layout


def test_few_large_workers_beside_many_small_ones_are_cut_to_what_fits() -> None:
    """One that has more GPUs than all others together, and is the only one of its phase."""
    asked_for = problem("h100:1x8,a100-80g:1x1", "in=300,out=60", "gpus", 25)
    large, small = (WorkerKind("h100", Parallelism(num, 1)) for num in (8, 1))
    bound = RateBound(1.0, 1.0)
    pair = Combination((Option("prefill", large, bound), Option("decode", small, bound)), is_paired=True)
    assert [one.num for one in cut(asked_for, pair, [1, 3]).sets] == [1, 1]


def test_a_run_that_begins_with_an_empty_cluster_flatters_and_is_not_believed() -> None:
    workload = synthetic_workload(named_lengths("chat"), 150, 1.0, seed=0)
    model = problem(SAME, "chat", "gpus", 4).sources["a100-80g"].model("a100-80g", 1, 1)
    goal = problem(SAME, "chat", "gpus", 4).goal
    trial = Trial(ClusterSpec((WorkerGroup("both", 1, model),)), workload, goal)
    once = goodput_per_s(trial, 5.0, held=holds_at_first)
    for_ever = goodput_per_s(trial, 5.0)
    assert for_ever < 0.9 * once
    assert holds_at_first(trial, for_ever)
    share = {
        rate: simulate(trial.spec, workload.at_rate(rate).repeated(20)).attainment(goal.targets).joint
        for rate in (for_ever, once)
    }
    assert share[once] < 0.8
    assert share[for_ever] > 0.85


def test_what_cannot_keep_up_is_said_to_fall_behind() -> None:
    asked_for = problem(SAME, "in=900,out=20", "gpus", 10)
    layout = next(iter(everything(asked_for)))
    trial = trial_of(asked_for, layout)
    most = goodput_per_s(trial, 10.0)
    assert steady_at(trial, 0.9 * most).keeps_up
    assert not steady_at(trial, 3 * most).keeps_up
    counted = steady_at(trial, 0.9 * most).result
    assert len(counted.start_s) == len(trial.workload)
    assert counted.is_completed.all()


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 50), st.integers(1, 60))
def test_the_least_number_is_found_from_any_guess(low: int, guess: int, most: int, enough: int) -> None:
    asked_of: list[int] = []

    def is_enough(num: int) -> bool:
        asked_of.append(num)
        return num >= enough

    expected = max(low, enough)
    assert least(is_enough, low, max(low, guess), most) == (expected if expected <= most else None)
    assert all(low <= one <= most for one in asked_of)
