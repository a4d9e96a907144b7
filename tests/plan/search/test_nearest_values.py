"""The nearest rate and targets, with answers that follow a rule instead of a search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.plan.layout import Layout
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.nearest import nearest_rate, nearest_targets
from halfmoon.sim.cluster.cluster_spec import SloTargets
from tests.plan.planning_problems import colocated, problem

ASKED = problem(rate_per_s=100.0, ttft_s=0.01, tpot_s=0.5, tbt_s=0.001)


@given(st.floats(0.5, 200.0), st.floats(0.85, 1.5))
def test_the_nearest_rate_is_held_and_within_two_percent(limit_per_s: float, error: float) -> None:
    def answer(asked: PlanningProblem) -> Layout | None:
        assert asked.rate_per_s is not None
        return colocated() if asked.rate_per_s <= limit_per_s else None

    found = nearest_rate(ASKED, error * limit_per_s, answer)
    if error > 1.02**11 * 1.02:
        assert found is None
    elif found is not None:
        rate_per_s, layout = found
        assert layout == colocated()
        assert rate_per_s <= limit_per_s
        assert rate_per_s >= min(error, 1.0) * limit_per_s / 1.02 * 0.99
        assert float(f"{rate_per_s:.3g}") == rate_per_s  # as it is printed
    else:
        assert error > 1.0


@given(st.floats(1.0, 45.0))
def test_the_nearest_targets_are_the_least_multiple_that_holds(needed: float) -> None:
    idle, tried = SloTargets(0.02, 0.1, 0.004), []

    def answer(asked: PlanningProblem) -> Layout | None:
        targets = asked.goal.targets
        assert targets.ttft_s is not None
        assert targets.tbt_s is not None
        return colocated() if min(targets.ttft_s / 0.02, targets.tbt_s / 0.004) >= needed else None

    found = nearest_targets(ASKED, idle, answer, lambda done, total: tried.append((done, total)))
    assert found is not None
    targets, _ = found
    assert targets.tpot_s == 0.5  # idle workers meet it
    assert targets.ttft_s is not None
    assert needed * 0.02 <= targets.ttft_s * (1 + 1e-9)
    assert targets.ttft_s <= 2.6 * needed * 0.02
    assert tried[-1][0] == tried[-1][1]
    assert [done for done, _ in tried] == sorted(done for done, _ in tried)


def test_targets_that_no_layout_meets_have_no_nearest() -> None:
    assert nearest_targets(ASKED, SloTargets(0.02, 0.1, 0.004), lambda asked: None, lambda done, total: None) is None


@pytest.mark.parametrize("guess_per_s", [1.0, 0.00012345, 98765.0])
def test_what_is_tried_is_what_is_printed(guess_per_s: float) -> None:
    seen: list[float] = []

    def answer(asked: PlanningProblem) -> Layout | None:
        assert asked.rate_per_s is not None
        seen.append(asked.rate_per_s)
        return None

    assert nearest_rate(ASKED, guess_per_s, answer) is None
    assert all(float(f"{rate:.3g}") == rate <= guess_per_s for rate in seen)
    assert seen == sorted(seen, reverse=True)
