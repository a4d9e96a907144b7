"""Which layouts are tried: combinations by affinity, codecs by the link, and larger layouts one worker at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.plan.layout import WorkerSet
from halfmoon.plan.search.combinations import Combination, combinations, kinds_of, larger, with_codecs
from halfmoon.plan.search.feasible import feasible_models, options
from tests.plan.planning_problems import ONE, colocated, disaggregated, problem


@pytest.mark.parametrize(
    ("nodes", "affinity", "paired"),
    [
        (1, "auto", {True}),
        (1, "high", {True}),
        (2, "auto", {True, False}),
        (2, "high", {False}),
        (2, "low", {True}),
    ],
)
def test_affinity_says_where_kv_may_go(nodes: int, affinity: str, paired: set[bool]) -> None:
    asked = problem(num_nodes=nodes, gpus_per_node=2, affinity=affinity)
    made = list(combinations(asked, options(asked, feasible_models(asked))))
    assert {combination.is_paired for combination in made if not combination.is_colocated} == paired
    assert not any(combination.is_paired for combination in made if combination.is_colocated)
    assert len(set(made)) == len(made)


def test_workers_of_different_gpus_are_never_paired() -> None:
    asked = problem(gpu="h100:1x2,a100-80g:1x2")
    for combination in combinations(asked, options(asked, feasible_models(asked))):
        assert not combination.is_paired or len({option.kind.gpu for option in combination.options}) == 1


def test_a_layout_is_of_its_combination() -> None:
    asked = problem(num_nodes=2, gpus_per_node=2)
    for combination in combinations(asked, options(asked, feasible_models(asked))):
        num = len(combination.options)
        small, large = combination.layout([1] * num), combination.layout([3] * num, 2)
        assert kinds_of(small) == kinds_of(large)
        assert large.num_gpus == 6 * small.num_gpus


@pytest.mark.parametrize(("gbit_per_s", "codecs"), [(0.5, ["raw", "int8", "int4"]), (4000.0, ["raw"])])
def test_codecs_are_tried_where_the_link_is_slow(gbit_per_s: float, codecs: list[str]) -> None:
    asked = problem(num_nodes=2, gpus_per_node=1, network_gbit_per_s=gbit_per_s)
    model = feasible_models(asked)[ONE]
    assert [layout.codec for layout in with_codecs(asked, model, disaggregated(), 1.0)] == codecs
    paired = replace(disaggregated(), is_paired=True)
    for layout in (paired, colocated()):
        assert [each.codec for each in with_codecs(asked, model, layout, 1.0)] == ["raw"]


@given(st.integers(1, 6), st.integers(1, 6))
def test_larger_layouts_have_one_worker_more_and_fit(prefill: int, decode: int) -> None:
    asked = problem(num_nodes=1, gpus_per_node=8)
    found = list(larger(asked, disaggregated(prefill, decode), []))
    assert all(layout.fits(asked.fleet) for layout in found)
    expected = [disaggregated(prefill + 1, decode), disaggregated(prefill, decode + 1)] if prefill + decode < 8 else []
    assert found == expected


def test_where_a_gpu_is_used_up_another_kind_fills_in() -> None:
    asked = problem(gpu="h100:1x1,a100-80g:1x2")
    found = list(larger(asked, colocated(1), options(asked, feasible_models(asked))))
    (layout,) = [layout for layout in found if layout.num_gpus == 2]
    assert layout.sets[0] == WorkerSet("both", ONE, 1)
    assert (layout.sets[1].kind.gpu, layout.sets[1].num) == ("a100-80g", 1)


def test_numbers_belong_to_options_in_order() -> None:
    asked = problem(num_nodes=2, gpus_per_node=8)
    prefill, decode = (
        next(option for option in options(asked, feasible_models(asked)) if option.role == role)
        for role in ("prefill", "decode")
    )
    layout = Combination((prefill, decode), is_paired=False).layout([2, 5])
    assert (layout.count("prefill"), layout.count("decode")) == (2, 5)
