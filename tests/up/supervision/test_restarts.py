"""The waits before restarts."""

from __future__ import annotations

import pytest

from halfmoon.up.supervision.restarts import DELAYS_S, SETTLED_S, RestartPolicy


def delays_s(policy: RestartPolicy, served_s: float | None, times: int, *, from_outside: bool) -> list[float | None]:
    return [policy.delay_s("decode-0", served_s, from_outside=from_outside) for _ in range(times)]


@pytest.mark.parametrize("served_s", [0.0, 3.1, SETTLED_S])
def test_a_service_that_is_killed_while_it_serves_starts_again_at_once_however_often(served_s: float) -> None:
    assert delays_s(RestartPolicy(), served_s, 10, from_outside=True) == [0.0] * 10


@pytest.mark.parametrize("served_s", [0.1, 3.1, SETTLED_S - 1])
def test_a_service_that_fails_again_and_again_waits_ever_longer(served_s: float) -> None:
    """One that failed every 3.1 s was once started again at once each time."""
    policy = RestartPolicy()
    assert delays_s(policy, served_s, 8, from_outside=False) == [*DELAYS_S, DELAYS_S[-1]]
    assert policy.delay_s("decode-1", served_s, from_outside=False) == DELAYS_S[0]


def test_kills_between_failures_change_nothing() -> None:
    policy = RestartPolicy()
    for expected in DELAYS_S:
        assert delays_s(policy, 5.0, 3, from_outside=True) == [0.0] * 3
        assert delays_s(policy, 5.0, 1, from_outside=False) == [expected]


def test_a_failure_after_long_service_is_the_first_one() -> None:
    policy = RestartPolicy()
    delays_s(policy, 1.0, 5, from_outside=False)
    assert delays_s(policy, SETTLED_S, 1, from_outside=False) == [DELAYS_S[0]]
    assert delays_s(policy, 1.0, 1, from_outside=False) == [DELAYS_S[1]]


@pytest.mark.parametrize("from_outside", [True, False])
def test_a_service_that_was_ready_once_may_fail_to_start_later(from_outside: bool) -> None:
    """Also if it is killed then: that may be for want of memory, again and again."""
    policy = RestartPolicy()
    assert delays_s(policy, SETTLED_S, 1, from_outside=True) == [0.0]
    assert delays_s(policy, None, 3, from_outside=from_outside) == list(DELAYS_S[:3])


@pytest.mark.parametrize("from_outside", [True, False])
@pytest.mark.parametrize("num_times", [1, 3])
def test_a_service_that_never_was_ready_is_not_started_again(num_times: int, from_outside: bool) -> None:
    assert delays_s(RestartPolicy(), None, num_times, from_outside=from_outside) == [None] * num_times
