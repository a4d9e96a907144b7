"""The goodput of one layout over targets: what a search for each pair of targets alone finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.search.feasible import feasible_models
from halfmoon.plan.search.goodput import Trial, about_holds, goodput_per_s
from halfmoon.plan.targets.goodput_surface import SurfaceTrial, goodput_surface, loosest
from halfmoon.plan.targets.target_grid import TargetGrid, around, spaced
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, SloTargets
from halfmoon.sim.simulation import simulate
from tests.plan.planning_problems import colocated, disaggregated, problem
from tests.sim.small_clusters import FAST, group, work

GRID = TargetGrid((0.03, 0.1, 0.4), (0.008, 0.02, 0.05))


def trial(*, is_colocated: bool) -> Trial:
    asked = problem(num_requests=100)
    layout = colocated(2) if is_colocated else disaggregated(1, 1)
    return layout_trial(asked, feasible_models(asked), layout)


def surface_trial(of: Trial, floor: float = 0.0) -> SurfaceTrial:
    return SurfaceTrial(loosest(of, GRID), GRID, 40.0, np.full(GRID.shape, floor))


@pytest.mark.parametrize("is_colocated", [True, False])
def test_each_cell_is_what_a_search_for_its_targets_finds(is_colocated: bool) -> None:
    of = trial(is_colocated=is_colocated)
    found = goodput_surface(surface_trial(of))
    for row, ttft_s in enumerate(GRID.ttfts_s):
        for column, tpot_s in enumerate(GRID.tpots_s):
            alone = replace(of, goal=replace(of.goal, targets=SloTargets(ttft_s, tpot_s)))
            expected = goodput_per_s(alone, 40.0, held=about_holds)
            assert found[row, column] == pytest.approx(expected, rel=0.1, abs=1.5)
    assert found[-1, -1] > 0


def test_looser_targets_never_have_less() -> None:
    found = goodput_surface(surface_trial(trial(is_colocated=True)))
    assert (np.diff(found, axis=0) >= 0).all()
    assert (np.diff(found, axis=1) >= 0).all()


def test_what_is_below_the_floor_is_left_out() -> None:
    of = trial(is_colocated=True)
    found = goodput_surface(surface_trial(of))
    floor = (found[0].max() + found[-1, -1]) / 2
    above = goodput_surface(surface_trial(of, floor))
    assert 0 < found[0].max() < floor < found[-1, -1]
    assert not above[0].any()
    assert above[-1, -1] == pytest.approx(found[-1, -1], rel=0.1)
    assert not goodput_surface(surface_trial(of, np.inf)).any()


@pytest.mark.parametrize("criterion", ["joint", "marginal"])
def test_one_pass_answers_for_every_cell(criterion: str) -> None:
    result = simulate(ClusterSpec((group("both"),), FAST), work(*((0.05 * at, 60, 1 + at % 9) for at in range(40))))
    grid = TargetGrid((0.1, 0.3, 0.8), (0.011, 0.03))
    shares = grid.attainment(result, criterion)  # type: ignore[arg-type]
    for row, ttft_s in enumerate(grid.ttfts_s):
        for column, tpot_s in enumerate(grid.tpots_s):
            expected = result.attainment(SloTargets(ttft_s, tpot_s)).value(criterion)  # type: ignore[arg-type]
            assert shares[row, column] == pytest.approx(expected)
    assert len(set(shares.ravel())) >= 3


def test_targets_lie_at_equal_ratios() -> None:
    assert spaced(0.01, 1.0, 3) == (0.01, 0.1, 1.0)
    assert around(0.2) == (0.05, 0.079, 0.13, 0.2, 0.32, 0.5, 0.8)
