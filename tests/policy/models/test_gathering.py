"""Decodes on shared cores wait for answers on their way, never longer than a target or the bounds allow."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.gathering import gathering_pause_s

STEPS_S = st.floats(1e-4, 1.0)
COUNTS = st.integers(0, 40)
TARGETS = st.lists(st.one_of(st.none(), st.just(math.inf), st.floats(1e-3, 2.0)), max_size=5)


@given(STEPS_S, COUNTS, COUNTS, TARGETS)
def test_a_pause_keeps_its_bounds(step_s: float, batch: int, num_coming: int, targets_s: list[float | None]) -> None:
    pause_s = gathering_pause_s(step_s, batch, num_coming, targets_s)
    assert 0 <= pause_s <= min(4 * step_s, 0.15)
    assert num_coming >= 2 or pause_s == 0
    for target_s in targets_s:
        if target_s is not None and pause_s > 0:
            assert step_s + pause_s <= target_s / 2


@given(STEPS_S, st.integers(1, 40), st.integers(2, 39), TARGETS)
def test_more_that_come_are_worth_a_longer_pause_and_more_that_run_a_shorter_one(
    step_s: float, batch: int, num_coming: int, targets_s: list[float | None]
) -> None:
    pause_s = gathering_pause_s(step_s, batch, num_coming, targets_s)
    assert gathering_pause_s(step_s, batch, num_coming + 1, targets_s) >= pause_s
    assert gathering_pause_s(step_s, batch + 1, num_coming, targets_s) <= pause_s


def test_a_burst_waits_four_steps_for_each() -> None:
    assert gathering_pause_s(0.02, 3, 20, [None, math.inf]) == 0.08
    assert gathering_pause_s(0.02, 8, 5, []) == 0.04
    assert gathering_pause_s(0.1, 3, 20, []) == 0.15
    assert math.isclose(gathering_pause_s(0.02, 3, 20, [None, 0.08]), 0.02)
