"""What a problem refuses says what to give instead; defaults are those measured, else the engine's."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.plan.layout import Layout, first_of_each_kind
from halfmoon.plan.problem import FIRST_REQUESTS, MAX_RUNNING
from tests.plan.planning_problems import TWO, colocated, disaggregated, problem


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"rate_per_s": 0.0}, "rate", "must be above 0 per second, and finite"),
        ({"rate_per_s": math.inf}, "rate", "must be above 0 per second, and finite"),
        ({"objective": "gpus"}, "rate", "fewest GPUs for which rate? give --rate"),
        ({"objective": "price"}, "rate", "the lowest price for which rate? give --rate"),
        ({"attainment": 0.0}, "attainment", "a share, above 0 and at most 1"),
        ({"attainment": 1.5}, "attainment", "a share, above 0 and at most 1"),
        ({"ttft_s": -1.0}, "ttft", "the target for TTFT must be a time above 0"),
        ({"tpot_s": math.inf}, "tpot", "the target for TPOT must be a time above 0"),
        ({"prefill_gpu": "h200"}, "prefill_gpu", "the fleet has no h200 for prefill: it has h100"),
        ({"network_gbit_per_s": 0.0}, "network", "more than 0 Gbit/s"),
        ({"model": " "}, "model", "give --model"),
        ({"latency": "l40s=roofline:llama-3-8b"}, "latency", "give one for each, as h100=SOURCE"),
        ({"latency": "roofline:llama-3-8b@h200"}, "latency", "leave out @h200"),
        ({"workload": "in=9000,out=1"}, "workload", "give shorter ones, or --context"),
    ],
)
def test_a_wrong_value_names_its_option(changes: dict[str, object], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        problem(**changes)
    assert says in caught.value.message
    assert caught.value.param == param


def test_defaults_are_the_engines_and_the_catalogues() -> None:
    asked = problem()
    assert {limits.max_running for limits in asked.rules.limits.values()} == {MAX_RUNNING}
    network = asked.rules.networks["h100"]
    assert (network.bytes_per_s, network.node_bytes_per_s) == (8 * 50e9, 450e9)
    assert problem(network_gbit_per_s=80.0).rules.networks["h100"].bytes_per_s == 10e9
    assert problem(max_running=7).rules.limits["decode"].max_running == 7
    assert asked.objective == "goodput-per-gpu"
    assert problem(rate_per_s=1.0).objective == "gpus"
    assert (asked.num_first, problem(is_thorough=True).num_first) == (FIRST_REQUESTS, 24)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_units_multiply_workers_gpus_and_price(prefill: int, decode: int, units: int) -> None:
    fleet = problem(prices={"h100": 2.0}).fleet
    once = disaggregated(prefill, decode, TWO)
    layout = Layout(once.sets, units, is_paired=True)
    assert layout.num_gpus == units * once.num_gpus == units * 2 * (prefill + decode)
    assert layout.count("decode") == units * decode
    assert layout.price_per_hour(fleet) == pytest.approx(2.0 * layout.num_gpus)
    text = f"{prefill} prefill TP2 + {decode} decode TP2"
    assert str(layout) == (f"{units} x ({text}), paired" if units > 1 else f"{text}, paired")


def test_the_first_of_each_kind() -> None:
    layouts = [disaggregated(2, 1), colocated(3), disaggregated(1, 1)]
    assert first_of_each_kind(layouts, lambda layout: layout) == {False: layouts[0], True: layouts[1]}
    assert first_of_each_kind(layouts[1:2], lambda layout: layout) == {True: layouts[1]}
