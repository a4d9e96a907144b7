"""Which layout is better: the cheapest for a rate, else the most goodput per cost, less what a codec loses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.plan.search.objective import loss, rank, worth, worth_at
from tests.plan.planning_problems import colocated, disaggregated, problem, rated


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.floats(0.1, 50)), min_size=2, max_size=8))
def test_the_best_is_the_cheapest_or_holds_most_for_its_cost(rows: list[tuple[int, int, float]]) -> None:
    layouts = [rated(disaggregated(prefill, decode), goodput) for prefill, decode, goodput in rows]
    cheapest = problem(rate_per_s=1.0, objective="gpus")
    assert min(layouts, key=lambda one: rank(cheapest, one)).layout.num_gpus == min(
        one.layout.num_gpus for one in layouts
    )
    for objective in ("goodput-per-gpu", "goodput-per-dollar"):
        asked = problem(objective=objective)
        best = min(layouts, key=lambda one: rank(asked, one))
        assert best.per_gpu == pytest.approx(max(one.per_gpu for one in layouts))
        assert worth(asked, best) == max(worth(asked, one) for one in layouts)


def test_costs_are_dollars_or_gpus() -> None:
    layout = disaggregated(1, 3)
    assert problem(rate_per_s=1.0, objective="gpus").cost(layout) == 4
    priced = problem(rate_per_s=1.0, objective="price", prices={"h100": 2.5})
    assert priced.cost(layout) == pytest.approx(10.0)
    assert layout.price_per_hour(priced.fleet) == pytest.approx(10.0)
    assert rated(layout, 4.0).per_dollar == pytest.approx(3600 * 4.0 / 12.0)


def test_a_lossier_codec_has_to_hold_more() -> None:
    asked = problem(objective="goodput-per-gpu")
    losses = [loss(replace(disaggregated(), codec=codec)) for codec in ("raw", "int8", "int4")]
    assert losses[0] == 1.0
    assert losses == sorted(set(losses))
    raw, int8 = disaggregated(), replace(disaggregated(), codec="int8")
    assert worth_at(asked, int8, losses[1] * 10.0) == pytest.approx(worth_at(asked, raw, 10.0))
    assert rank(asked, rated(raw, 10.0)) < rank(asked, rated(int8, 10.2))


def test_equal_gpus_and_price_are_decided_by_what_is_held() -> None:
    asked = problem(rate_per_s=1.0, objective="gpus")
    layouts = [rated(colocated(2), 5.0), rated(disaggregated(), 6.0)]
    assert min(layouts, key=lambda one: rank(asked, one)) is layouts[1]
