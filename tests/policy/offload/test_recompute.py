"""The split is the best there is: by trying them all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from halfmoon.policy.offload.recompute import (
    OffloadCosts,
    Recompute,
    best_inputs,
    best_tokens,
    blocks_to_run_again,
    choose_split,
    is_worth_less_inputs,
    layer_time,
)

seconds = st.floats(0, 10)
NEVER = Recompute(0.0, 1e9)
layers = st.integers(1, 40)
ways = st.builds(Recompute, seconds, seconds, seconds)
again = st.builds(Recompute, st.just(0.0), seconds, seconds)
costs = st.builds(OffloadCosts, seconds, seconds, ways, again, seconds, seconds)


@given(costs, st.integers(0, 80), layers)
@example(OffloadCosts(0.4296875, 0.0, Recompute(0.0, 1.0), Recompute(0.0, 0.0), 3.0), 36, 4)
def test_no_other_number_is_faster(of: OffloadCosts, num_tokens: int, num_layers: int) -> None:
    numbers = range(num_tokens + 1)
    inputs_s = [layer_time(of, num_tokens, num_layers, num_inputs=number) for number in numbers]
    tokens_s = [layer_time(of, num_tokens, num_layers, num_again=number) for number in numbers]
    for found, times_s in (
        (best_inputs(of, num_tokens, num_layers), inputs_s),
        (best_tokens(of, num_tokens, num_layers), tokens_s),
    ):
        assert found.layer_s == times_s[found.num_tokens]
        assert found.layer_s <= min(times_s) * (1 + 1e-9) + 1e-12
    chosen = choose_split(of, num_tokens, num_layers)
    assert chosen.layer_s <= inputs_s[0]
    assert chosen.layer_s <= min(*inputs_s, *tokens_s) / 0.85 * (1 + 1e-9) + 1e-12


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.integers(1, 5000))
def test_with_one_buffer_it_is_kvprs_closed_form(x: float, c: float, num_tokens: int) -> None:
    """b, h, p and the rates are in x = b h p / v_link and c = 4 b h^2 / v_gpu."""
    of = OffloadCosts(2 * x, 0.0, Recompute(x, c), NEVER)
    best = best_inputs(of, num_tokens, num_layers=1)
    assert abs(best.num_tokens - 2 * x * num_tokens / (c + 2 * x)) <= 1


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.integers(1, 5000), layers)
def test_inputs_gain_at_most_twice(x: float, c: float, num_tokens: int, num_layers: int) -> None:
    of = OffloadCosts(2 * x, 0.0, Recompute(x, c), NEVER)
    gain = layer_time(of, num_tokens, num_layers) / best_inputs(of, num_tokens, num_layers).layer_s
    assert 1 - 1e-9 <= gain <= 2 + 1e-9


@pytest.mark.parametrize("num_layers", [1, 12])
def test_each_way_is_chosen_where_it_wins(num_layers: int) -> None:
    tokens = Recompute(0.0, 8.0)
    fast = choose_split(OffloadCosts(2.0, 0.0, Recompute(1.0, 0.1), tokens), 1000, num_layers)
    slow = choose_split(OffloadCosts(2.0, 0.0, Recompute(1.0, 500.0), tokens), 1000, num_layers)
    grouped = choose_split(OffloadCosts(2.0, 0.0, None, tokens), 1000, num_layers)
    plain = choose_split(OffloadCosts(2.0, 0.0, None, Recompute(0.0, 100.0)), 1000, num_layers)
    assert (fast.kind, slow.kind, grouped.kind) == ("inputs", "tokens", "tokens")
    assert (plain.kind, plain.num_tokens, plain.layer_s) == ("load", 0, 2000.0)  # what it would gain is too little


def test_inputs_that_are_no_smaller_are_never_fetched() -> None:
    of = OffloadCosts(1.0, 0.0, Recompute(1.0, 0.0), NEVER)
    assert best_inputs(of, 100, 4).num_tokens == 0
    assert choose_split(of, 100, 4).kind == "load"


@pytest.mark.parametrize("num_layers", [1, 12])
def test_a_busy_device_and_a_slow_beginning_load(num_layers: int) -> None:
    of = OffloadCosts(2.0, 0.0, Recompute(1.0, 0.1), NEVER)
    assert choose_split(of, 100, num_layers).kind == "inputs"
    assert choose_split(replace(of, base_s=1e6), 100, num_layers).kind == "load"
    slow_to_begin = replace(of, inputs=Recompute(1.0, 0.1, begin_s=250.0))
    assert choose_split(slow_to_begin, 100, num_layers).kind == "load"


def test_what_steps_took_outweighs_what_was_predicted() -> None:
    of = OffloadCosts(2.0, 0.0, Recompute(1.0, 0.1), Recompute(0.0, 0.5))
    assert choose_split(of, 1000, 12).kind == "tokens"
    assert choose_split(of, 1000, 12, {"load": 1.0, "inputs": 1.0, "tokens": 4.0}).kind == "inputs"
    assert choose_split(of, 1000, 12, {"load": 1.0, "inputs": 2.0, "tokens": 6.0}).kind == "load"
    assert choose_split(of, 1000, 12, {"load": 2.0, "inputs": 2.0, "tokens": 6.0}).kind == "inputs"


def test_too_many_inputs_are_noticed() -> None:
    of = OffloadCosts(2.0, 0.0, Recompute(1.0, 20.0), NEVER)
    best = best_inputs(of, 100, 12)
    assert not is_worth_less_inputs(of, 100, 12, best.num_tokens, best.layer_s)
    assert is_worth_less_inputs(of, 100, 12, 100, best.layer_s)


@given(costs, st.integers(0, 60), layers, st.integers(0, 10))
def test_what_runs_again_is_hidden_or_repaid(of: OffloadCosts, num_tokens: int, num_layers: int, steps: int) -> None:
    more_blocks = num_tokens // 8
    blocks = blocks_to_run_again(of, num_tokens, num_layers, 0, more_blocks, 8, steps)
    assert 0 <= blocks <= more_blocks
    now_s = layer_time(of, num_tokens, num_layers)
    extra_s = layer_time(of, num_tokens, num_layers, num_again=8 * blocks) - now_s
    assert extra_s <= 0 or extra_s < steps * (now_s - layer_time(of, num_tokens, num_layers, num_inputs=8))
