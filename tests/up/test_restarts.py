"""The waits before restarts."""

from __future__ import annotations

import pytest

from halfmoon.up.restarts import DELAYS_S, SETTLED_S, RestartPolicy


def test_a_service_that_served_for_a_while_starts_again_at_once_however_often() -> None:
    policy = RestartPolicy()
    assert [policy.delay_s("decode-0", SETTLED_S + 1) for _ in range(10)] == [0.0] * 10


def test_a_service_that_ends_at_once_waits_ever_longer() -> None:
    policy = RestartPolicy()
    assert policy.delay_s("decode-0", SETTLED_S) == 0.0
    assert [policy.delay_s("decode-0", 0.1) for _ in range(7)] == [*DELAYS_S, DELAYS_S[-1]]
    assert policy.delay_s("decode-1", 0.1) == DELAYS_S[0]


def test_a_service_that_was_ready_once_may_fail_to_start_later() -> None:
    policy = RestartPolicy()
    assert policy.delay_s("decode-0", SETTLED_S) == 0.0
    assert [policy.delay_s("decode-0", None) for _ in range(2)] == list(DELAYS_S[:2])
    assert policy.delay_s("decode-0", SETTLED_S) == 0.0
    assert policy.delay_s("decode-0", 0.0) == DELAYS_S[0]


@pytest.mark.parametrize("num_times", [1, 3])
def test_a_service_that_never_was_ready_is_not_started_again(num_times: int) -> None:
    policy = RestartPolicy()
    assert [policy.delay_s("decode-0", None) for _ in range(num_times)] == [None] * num_times
