"""The token bucket: never more than the rate and one bucket, and never less than the rate while asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.admission.token_bucket import TokenBucket

RATES = st.floats(1.0, 1e6)
STEPS = st.lists(st.tuples(st.floats(0, 30), st.floats(0.01, 2.0)), min_size=1, max_size=50)  # pause, cost / rate


@given(RATES, STEPS)
def test_no_more_than_the_rate_a_bucket_and_one_request_above_it(rate: float, steps: list[tuple[float, float]]) -> None:
    bucket, now_s, taken = TokenBucket(rate, 0.0), 0.0, 0.0
    for pause_s, share in steps:
        now_s, cost = now_s + pause_s, share * rate
        if bucket.wait_s(cost, now_s) == 0:
            bucket.take(cost, now_s)
            taken += cost
        assert bucket.level(now_s) <= rate
        assert taken <= rate * now_s / 60 + rate + max(0.0, max(share for _, share in steps) - 1) * rate + 1e-6 * rate


@given(RATES, STEPS)
def test_what_waits_as_told_is_let_in(rate: float, steps: list[tuple[float, float]]) -> None:
    bucket, now_s = TokenBucket(rate, 0.0), 0.0
    for _, share in steps:
        cost = share * rate
        wait_s = bucket.wait_s(cost, now_s)
        now_s += wait_s
        assert bucket.wait_s(cost, now_s) == pytest.approx(0, abs=1e-6)
        bucket.take(cost, now_s)
    assert bucket.full_in_s(now_s) == pytest.approx((rate - bucket.level(now_s)) * 60 / rate)


@given(RATES, STEPS)
def test_what_is_given_back_never_makes_more_than_a_bucket(rate: float, steps: list[tuple[float, float]]) -> None:
    bucket, now_s = TokenBucket(rate, 0.0), 0.0
    for pause_s, share in steps:
        now_s += pause_s
        bucket.take(-share * rate, now_s)
        assert bucket.level(now_s) == rate


def test_a_debt_is_paid_first() -> None:
    bucket = TokenBucket(60.0, 0.0)
    bucket.take(90.0, 0.0)
    assert (bucket.level(0.0), bucket.wait_s(0.0, 0.0), bucket.wait_s(1.0, 0.0)) == (-30, 30, 31)
    assert bucket.level(40.0) == 10
    assert bucket.wait_s(1_000.0, 40.0) == 50  # as much as a full bucket: more is never there


def test_another_period() -> None:
    bucket = TokenBucket(60.0, 0.0, period_s=3600.0)
    bucket.take(60.0, 0.0)
    assert (bucket.level(600.0), bucket.wait_s(1.0, 0.0), bucket.full_in_s(600.0)) == (10, 60, 3000)


def test_a_changed_rate_keeps_the_share() -> None:
    bucket = TokenBucket(60.0, 0.0)
    bucket.take(30.0, 0.0)
    bucket.change_rate(600.0, 0.0)
    assert (bucket.level(0.0), bucket.level(3.0)) == (300, 330)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(60.0, 100.0)
    bucket.take(60.0, 100.0)
    assert bucket.level(0.0) == 0
    bucket.take(0.0, 0.0)
    assert bucket.level(100.0) == 0
