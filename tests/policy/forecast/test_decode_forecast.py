"""Decode loads to come: at a moment, over an answer, and when somebody decodes at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.forecast.decode_forecast import DecodeForecast


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
    here, nobody = np.array([True, False]), [str(number) for number in range(len(lives))]
    found = forecast.spans(here, now_s).union(now_s)
    spans = list(zip(found.begins_s.tolist(), found.ends_s.tolist(), strict=True))
    assert all(begin_s <= end_s for begin_s, end_s in spans)
    assert all(one[1] < other[0] for one, other in pairwise(spans))
    for joins_s, stays_s in lives:
        if joins_s + stays_s > now_s:
            begins_s = max(joins_s, now_s)  # what was is not told
            assert any(begin_s <= begins_s and joins_s + stays_s <= end_s for begin_s, end_s in spans)
    assert len(forecast.spans(here, now_s, without=nobody).rows) == 0
    assert len(forecast.spans(~here & False, now_s).rows) == 0


@given(LIVES, st.sets(st.integers(0, 11)), st.floats(0, 9), st.floats(0, 9))
def test_loads_are_of_those_who_came_and_did_not_leave(
    lives: list[tuple[float, float]], left: set[int], now_s: float, later_s: float
) -> None:
    forecast, at_s = DecodeForecast(), now_s + later_s
    for number, (joins_s, stays_s) in enumerate(lives):
        forecast.join(str(number), number % 3, joins_s, joins_s + stays_s, 10, 0)
    for number in left:
        forecast.leave(str(number))
    expected = [0, 0, 0]
    for number, (joins_s, stays_s) in enumerate(lives):
        ends_s = joins_s + stays_s
        if ends_s < now_s:
            ends_s = now_s + 0.25 * (now_s - joins_s)
        expected[number % 3] += number not in left and joins_s <= at_s <= ends_s
    batch, context = forecast.loads(at_s, now_s, 3)
    assert batch.tolist() == expected
    assert context.tolist() == [10 * num for num in expected]


def test_only_the_latest_joins_tell_who_usually_joins() -> None:
    forecast = DecodeForecast()
    for number in range(1_000):  # ten a second: the last 256 are what counts, which stay briefly
        forecast.join(str(number), 0, number / 10, number / 10 + (0.5 if number >= 744 else 5.0), 80, 40)
        forecast.begin(str(number), number / 10)
        forecast.leave(str(number))
    batch, context = forecast.mean_load(0, 99.9, 199.9, 99.9)
    assert batch == pytest.approx(256 / 25.5 * 0.5 * (1 - 0.5 / 100 / 2))
    assert context == pytest.approx(batch * 120)


def test_requests_join_stay_and_leave() -> None:
    forecast = DecodeForecast()
    for number in range(200):
        forecast.join(f"r{number}", number % 2, 1.0, 11.0, 100, 50)
    loads = forecast.loads(6.0, 0.0, 3)
    assert loads.batch.tolist() == [100, 100, 0]
    assert loads.context_tokens.tolist() == [100 * 125, 100 * 125, 0]
    assert forecast.loads(0.5, 0.0, 3).batch.tolist() == [0, 0, 0]
    assert forecast.loads(11.5, 0.0, 3).batch.tolist() == [0, 0, 0]
    assert forecast.loads(15.5, 15.0, 3).batch.tolist() == [100, 100, 0]  # overdue: a quarter of their life more
    assert forecast.loads(19.0, 15.0, 3).batch.tolist() == [0, 0, 0]
    assert forecast.next_ends(1, 0.0).tolist() == [11.0] * 100
    forecast.begin("r0", 5.0)
    assert forecast.loads(14.0, 5.0, 3).batch.tolist() == [1, 0, 0]
    for number in range(200):
        forecast.leave(f"r{number}")
        forecast.leave(f"r{number}")
    assert len(forecast) == 0
    assert forecast.loads(6.0, 0.0, 3).batch.tolist() == [0, 0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 1), st.floats(0, 20), st.floats(0, 20), st.integers(1, 99)), max_size=8),
    st.floats(0, 10),
    st.floats(0, 10),
    st.floats(0, 1),
)
def test_no_moment_has_less_than_the_lower_bound(
    requests: Sequence[tuple[int, float, float, int]], from_s: float, lasting_s: float, share: float
) -> None:
    forecast, now_s = DecodeForecast(), 5.0
    for number, (row, joins_s, life_s, num_tokens) in enumerate(requests):
        forecast.join(str(number), row, joins_s, joins_s + life_s, num_tokens, num_tokens)
    until_s = now_s + from_s + lasting_s
    least = forecast.loads_lower_bound(now_s + from_s, until_s, now_s, 2)
    at = forecast.loads(now_s + from_s + share * lasting_s, now_s, 2)
    assert (least.batch <= at.batch).all()
    assert (least.context_tokens <= at.context_tokens + 1e-6).all()
