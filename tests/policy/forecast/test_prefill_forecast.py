"""What is ahead of a prompt: by priority, in order, and shared with a long one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.forecast.prefill_forecast import PrefillForecast

STEP_S = 1.0


def waits(forecast: PrefillForecast, takes_s: float = 1.0, priority: int = 0, now_s: float = 0.0) -> list[float]:
    return [round(float(one), 6) for one in forecast.waits(np.full(2, takes_s), priority, now_s)]


def test_each_waits_for_those_before_it() -> None:
    forecast = PrefillForecast()
    for name, row, takes_s in (("a", 0, 0.5), ("b", 0, 0.25), ("c", 1, 0.125)):
        forecast.join(name, row, takes_s, STEP_S, 0, 0.0)
    assert waits(forecast) == [0.75, 0.125]
    assert waits(forecast, now_s=0.25) == [0.5, 0.0]
    assert waits(forecast, now_s=9.0) == [0.25, 0.0]  # the first one is overdue
    forecast.leave("a", 0.25)  # sooner than predicted
    assert waits(forecast, now_s=0.25) == [0.25, 0.0]
    assert forecast.totals(2, 0.25).tolist() == [0.25, 0.0]
    forecast.leave("a", 0.25)
    assert len(forecast) == 2


def test_only_what_is_ahead_by_priority_counts() -> None:
    forecast = PrefillForecast()
    for name, priority in (("low", 5), ("lower", 6), ("high", -1)):
        forecast.join(name, 0, 0.5, STEP_S, priority, 0.0)
    assert waits(forecast, priority=9) == [1.5, 0.0]
    assert waits(forecast, priority=5) == [1.0, 0.0]
    assert waits(forecast, priority=0) == [0.5, 0.0]
    assert waits(forecast, priority=-2) == [0.25, 0.0]  # half of a step that is under way


def test_a_short_prompt_shares_the_steps_of_a_long_one() -> None:
    forecast = PrefillForecast()
    forecast.join("long", 0, 10.0, STEP_S, 0, 0.0)
    assert waits(forecast, 2.0) == [2.0 + STEP_S / 2, 0.0]
    assert waits(forecast, 20.0) == [10.0, 0.0]  # not shorter
    forecast.join("short", 0, 1.0, STEP_S, 0, 0.0)
    assert waits(forecast, 2.0) == [1.0 + 3.0 + STEP_S / 2, 0.0]
    assert waits(forecast, 0.5) == [0.5 + STEP_S / 2, 0.0]  # before the other short one
    forecast.leave("short", 2.0)  # half of the two seconds were the long one's
    assert forecast.totals(2, 2.0)[0] == pytest.approx(9.0)


def test_a_worker_whose_steps_are_not_known_computes_in_order() -> None:
    forecast = PrefillForecast()
    forecast.join("long", 0, 10.0, math.inf, 0, 0.0)
    assert waits(forecast, 2.0) == [10.0, 0.0]


PROMPT = st.tuples(st.integers(0, 1), st.floats(0.01, 9), st.integers(-1, 1), st.floats(0, 2), st.booleans())


@given(st.lists(PROMPT, max_size=80), st.floats(0.01, 9), st.integers(-1, 1))
def test_nobody_waits_for_more_than_there_is(
    prompts: list[tuple[int, float, int, float, bool]], takes_s: float, priority: int
) -> None:
    forecast, now_s = PrefillForecast(), 0.0
    for number, (row, length_s, rank, pause_s, leaves) in enumerate(prompts):
        now_s += pause_s
        forecast.join(str(number), row, length_s, STEP_S, rank, now_s)
        if leaves:
            forecast.leave(str(number // 2), now_s)
    found, totals = forecast.waits(np.full(2, takes_s), priority, now_s), forecast.totals(2, now_s)
    assert (found >= 0).all()
    assert (found <= totals + 1e-9).all()
    assert (forecast.waits(np.full(2, takes_s), priority + 1, now_s) >= 0).all()
    for number in range(len(prompts)):
        forecast.leave(str(number), now_s)
    assert len(forecast) == 0
    assert not forecast.totals(2, now_s).any()
