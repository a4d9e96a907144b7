"""The restore plan is the best of all plans, found by a formula."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.forecast.restore_plan import (
    LayerLoads,
    RestoreCosts,
    RestorePlan,
    meeting_point,
    or_by_layer,
    plan_restore,
    until_step_s,
)

QUEUE_S = st.floats(0, 2) | st.just(0.0)
COSTS = st.builds(
    RestoreCosts,
    compute_s_per_token=st.floats(1e-6, 1e-2),
    load_s_per_token=st.floats(1e-6, 1e-2) | st.just(math.inf),
    compute_s_per_token2=st.floats(1e-12, 1e-5) | st.just(0.0),
    load_queue_s=QUEUE_S,
    compute_queue_s=QUEUE_S,
)
BLOCK = 64


@given(COSTS, st.integers(0, 60))
def test_no_plan_is_quicker(costs: RestoreCosts, num_blocks: int) -> None:
    plan = plan_restore(costs, num_blocks, BLOCK)
    every = [costs.restore_s(number * BLOCK, num_blocks * BLOCK) for number in range(num_blocks + 1)]
    assert plan.seconds == pytest.approx(min(every))
    assert plan.seconds == every[plan.num_compute_blocks]
    assert plan.num_compute_blocks + plan.num_load_blocks == num_blocks


@given(COSTS, st.integers(1, 60), st.floats(0.2, 5), st.floats(0.2, 5))
def test_a_wrong_prediction_costs_no_more_than_its_error(
    costs: RestoreCosts, num_blocks: int, compute_factor: float, load_factor: float
) -> None:
    true = costs._replace(
        compute_s_per_token=costs.compute_s_per_token * compute_factor,
        compute_s_per_token2=costs.compute_s_per_token2 * compute_factor,
        load_s_per_token=costs.load_s_per_token * load_factor,
    )
    num_tokens = num_blocks * BLOCK
    taken_s = true.restore_s(plan_restore(costs, num_blocks, BLOCK).num_compute_blocks * BLOCK, num_tokens)
    single_s = min(true.compute_s(num_tokens), true.load_s(num_tokens))
    spread = max(compute_factor, load_factor, 1) / min(compute_factor, load_factor, 1)
    assert taken_s <= spread * single_s * (1 + 1e-9)


@given(COSTS, st.integers(1, 5000))
def test_both_sides_end_at_once(costs: RestoreCosts, num_tokens: int) -> None:
    middle = meeting_point(costs, num_tokens)
    assert 0 <= middle <= num_tokens
    if 0 < middle < num_tokens:
        assert costs.compute_s(middle) == pytest.approx(costs.load_s(num_tokens - middle), rel=1e-6)


@given(st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-2), st.floats(0, 1), st.floats(0, 1))
def test_the_formula_where_computing_is_linear(alpha: float, gamma: float, t0: float, c0: float) -> None:
    costs = RestoreCosts(alpha, gamma, 0.0, t0, c0)
    expected = min(1000, max(0, (gamma * 1000 + t0 - c0) / (alpha + gamma)))
    assert meeting_point(costs, 1000) == pytest.approx(expected)
    assert meeting_point(costs._replace(compute_s_per_token2=1e-18), 1000) == pytest.approx(expected, rel=1e-6)


def test_the_formula_with_beta() -> None:
    alpha, gamma, beta, n = 1e-4, 2e-4, 1e-7, 4096
    root = math.sqrt((alpha + gamma) ** 2 + 2 * beta * (gamma * n + 0.1 - 0.2))
    costs = RestoreCosts(alpha, gamma, beta, load_queue_s=0.1, compute_queue_s=0.2)
    assert meeting_point(costs, n) == pytest.approx((-(alpha + gamma) + root) / beta)


def test_the_extremes() -> None:
    assert plan_restore(RestoreCosts(1e-3, math.inf), 10, BLOCK).method == "compute"
    assert plan_restore(RestoreCosts(1e-3, 1e-9), 10, BLOCK).method == "load"
    assert plan_restore(RestoreCosts(1e-3, 1e-3), 10, BLOCK) == RestorePlan(5, 5, 5 * BLOCK * 1e-3)
    assert plan_restore(RestoreCosts(1e-3, 1e-3), 10, BLOCK).method == "both"
    assert plan_restore(RestoreCosts(1e-3, 1e-3), 0, BLOCK).method == "none"
    assert plan_restore(RestoreCosts(1e-3, 1e-3, load_queue_s=60), 10, BLOCK).method == "compute"
    assert plan_restore(RestoreCosts(1e-3, 1e-3, compute_queue_s=60), 10, BLOCK).method == "load"
    assert plan_restore(RestoreCosts(0.0, 0.0), 10, BLOCK).seconds == 0


@given(st.floats(1e-4, 5), st.integers(1, 30), st.floats(0.0, 5))
def test_what_a_step_hides_is_what_its_layers_do_not_wait_for(step_s: float, num_passes: int, load_s: float) -> None:
    """Layer by layer: pass p arrives at (p + 1) / P of the load, and is needed after p / P of the step."""
    layers = LayerLoads(step_s, num_passes)
    end_s = 0.0
    for number in range(num_passes):
        end_s = max(end_s, load_s * (number + 1) / num_passes) + step_s / num_passes
    assert layers.wait_s(1.0, load_s) == pytest.approx(end_s - step_s)
    assert layers.wait_s(0.0, 0.0) == 0
    if load_s <= step_s:
        begin_s = until_step_s(1e9, 0.0, load_s, step_s, num_passes, overhead_s=0.0)
        assert begin_s == (pytest.approx(end_s - step_s) if load_s > load_s / num_passes else 1e9), (
            "never after the load"
        )


def test_all_comes_by_layer_where_a_longer_step_hides_it() -> None:
    costs = RestoreCosts(1e-3, 1e-4, load_queue_s=0.3)
    load_s = 20 * BLOCK * 1e-4
    met = RestorePlan(0, 20, 0.3 + load_s)
    found = or_by_layer(met, costs, BLOCK, LayerLoads(load_s, 5, 0.02), 20)
    assert found.method == "layers"
    assert found.seconds == pytest.approx(0.3 + load_s / 5 + 0.02)
    for layers in (LayerLoads(0.9 * load_s, 5), LayerLoads(100 * load_s, 5), LayerLoads(load_s, 0)):
        assert or_by_layer(met, costs, BLOCK, layers, 20) is met
    assert or_by_layer(met, costs, BLOCK, LayerLoads(load_s, 5, 0.02), 19) is met, "not all at once"


@given(st.floats(0, 2), st.floats(0, 2), st.floats(0, 5), st.floats(0.0, 20.0), st.integers(0, 30))
def test_a_step_never_begins_later_by_layer_than_by_block(
    wait_s: float, load_s: float, step_s: float, other_s: float, num_passes: int
) -> None:
    seconds = until_step_s(other_s, wait_s, load_s, step_s, num_passes)
    assert seconds == other_s or seconds < min(other_s, wait_s + load_s)
