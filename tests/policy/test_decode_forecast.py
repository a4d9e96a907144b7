"""Decode loads to come: at a moment, over an answer, and when somebody decodes at all."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.decode_forecast import DecodeForecast


def test_the_mean_over_an_answer_counts_who_leaves_and_who_joins() -> None:
    forecast = DecodeForecast()
    forecast.join("leaves", 0, 0.0, 3.0, 100, 20)
    forecast.join("joins", 0, 4.0, 9.0, 200, 20)
    forecast.join("elsewhere", 1, 0.0, 9.0, 900, 20)
    assert forecast.mean_load(0, 1.0, 5.0, 1.0) == pytest.approx((0.5 + 0.25, 0.5 * 110 + 0.25 * 210))
    assert forecast.mean_load(2, 1.0, 5.0, 1.0) == (0.0, 0.0)


def test_who_usually_joins_is_expected() -> None:
    forecast = DecodeForecast()
    for number in range(21):  # one a second, each for half a second
        forecast.join(str(number), 0, number, number + 0.5, 80, 40)
        forecast.begin(str(number), float(number))
        forecast.leave(str(number))
    batch, context = forecast.mean_load(0, 20.0, 30.0, 20.0)
    assert batch == pytest.approx(0.5, rel=0.1)
    assert context == pytest.approx(batch * 120)
    assert forecast.mean_load(0, 20.0, 20.25, 20.0).batch == pytest.approx(0.125, rel=0.1)  # few come so soon


LIVES = st.lists(st.tuples(st.floats(0, 9), st.floats(0.1, 5)), max_size=12)


@given(LIVES, st.floats(0, 9))
def test_spans_are_apart_and_cover_every_life(lives: list[tuple[float, float]], now_s: float) -> None:
    forecast = DecodeForecast()
    for number, (joins_s, stays_s) in enumerate(lives):
        forecast.join(str(number), 0, joins_s, joins_s + stays_s, 10, 10)
    spans = forecast.spans([0], now_s)[0]
    assert all(begin_s <= end_s for begin_s, end_s in spans)
    assert all(one[1] < other[0] for one, other in pairwise(spans))
    for joins_s, stays_s in lives:
        if joins_s + stays_s > now_s:
            assert any(begin_s <= joins_s and joins_s + stays_s <= end_s for begin_s, end_s in spans)
    assert forecast.spans([0], now_s, without=[str(number) for number in range(len(lives))]) == {0: []}
