"""The split is the best there is: by trying them all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.offload import OffloadCosts, Overlap, Recompute, best_num_tokens, choose_split, layer_time

seconds = st.floats(0, 10)
OVERLAPS: tuple[Overlap, ...] = ("within", "across")


@given(seconds, seconds, seconds, seconds, st.integers(0, 80), st.sampled_from(OVERLAPS))
def test_no_other_number_is_faster(
    load_s: float, base_s: float, fetch_s: float, compute_s: float, num_tokens: int, overlap: Overlap
) -> None:
    way = Recompute(fetch_s, compute_s)
    costs = OffloadCosts(load_s, base_s, way, way)
    best = best_num_tokens(costs, way, num_tokens, overlap)
    times = [layer_time(costs, way, num_tokens, number, overlap) for number in range(num_tokens + 1)]
    assert times[best] <= min(times) * (1 + 1e-9) + 1e-12


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.integers(1, 5000))
def test_it_is_kvprs_closed_form(x: float, c: float, num_tokens: int) -> None:
    """b, h, p and the rates are in x = b h p / v_link and c = 4 b h^2 / v_gpu."""
    way = Recompute(x, c)
    costs = OffloadCosts(2 * x, 0.0, way, Recompute(0.0, 1e9))
    best = best_num_tokens(costs, way, num_tokens, "within")
    assert abs(best - 2 * x * num_tokens / (c + 2 * x)) <= 1
    gain = layer_time(costs, None, num_tokens, 0, "within") / layer_time(costs, way, num_tokens, best, "within")
    assert gain <= 2 + 1e-9


def test_each_way_is_chosen_where_it_wins() -> None:
    slow_device, fast_device, tokens = Recompute(1.0, 500.0), Recompute(1.0, 0.1), Recompute(0.0, 8.0)
    for overlap in OVERLAPS:
        assert choose_split(OffloadCosts(2.0, 0.0, fast_device, tokens), 1000, overlap).kind == "inputs"
        assert choose_split(OffloadCosts(2.0, 0.0, slow_device, tokens), 1000, overlap).kind == "tokens"
        assert choose_split(OffloadCosts(2.0, 0.0, None, Recompute(0.0, 8.0)), 1000, overlap).kind == "tokens"
        plain = choose_split(OffloadCosts(2.0, 0.0, None, Recompute(0.0, 100.0)), 1000, overlap)
        assert (plain.kind, plain.num_tokens, plain.layer_s) == ("load", 0, 2000.0)  # what it would gain is too little


def test_inputs_that_are_no_smaller_are_never_fetched() -> None:
    costs = OffloadCosts(1.0, 0.0, Recompute(1.0, 0.0), Recompute(0.0, 1e9))
    assert best_num_tokens(costs, Recompute(1.0, 0.0), 100, "within") == 0
    assert choose_split(costs, 100, "across").kind == "load"


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_busy_device_loads(overlap: Overlap) -> None:
    way = Recompute(1.0, 1.0)
    assert best_num_tokens(OffloadCosts(2.0, 1e6, way, way), way, 100, overlap) == 0
