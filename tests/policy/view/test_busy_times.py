"""When workers had work: counted by request, averaged over a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.view.busy_times import BusyTimes


def times_of(*workers: str) -> BusyTimes:
    """One that asks, and those beside it; another one elsewhere is always busy."""
    made = BusyTimes()
    for worker_id in ("me", *workers):
        made.join(worker_id, "here")
    made.join("other", "there")
    made.begin("other", "x", -99.0)
    return made


def test_a_worker_is_busy_from_its_first_request_to_its_last() -> None:
    times = times_of("d")
    times.begin("d", "a", 1.0)
    times.begin("d", "b", 2.0)
    times.end("d", "a", 3.0)
    times.end("d", "a", 3.5)  # twice is once
    assert times.mean_busy_colocated("me", 0.0, 4.0) == 0.75  # still
    times.end("d", "b", 5.0)
    assert times.mean_busy_colocated("me", 0.0, 8.0) == 0.5
    assert times.mean_busy_colocated("d", 0.0, 8.0) == 0.0  # nobody is beside itself
    assert times.mean_busy_colocated("me", 3.0, 3.0) == 0.0


def test_who_is_gone_is_busy_no_more() -> None:
    times = times_of("d", "e")
    times.begin("d", "a", 1.0)
    times.begin("e", "b", 2.0)
    times.forget("d")
    times.begin("d", "c", 2.5)  # a call that still ran
    times.end("d", "a", 3.0)
    assert times.mean_busy_colocated("me", 2.0, 4.0) == 1.0
    for worker_id in ("e", "me"):
        times.forget(worker_id)
    times.join("me", "here")
    assert times.mean_busy_colocated("me", 0.0, 4.0) == 0.0


def test_what_is_usual_is_that_of_a_minute_at_most() -> None:
    times = times_of("d")
    assert times.usual_colocated("me", 0.0) == 0.0
    for number in range(200):
        times.begin("d", "a", float(number))
        times.end("d", "a", number + (0.25 if number < 100 else 0.75))
        if number == 9:
            assert times.usual_colocated("me", 9.9) == 0.0  # little is known
            assert times.usual_colocated("me", 10.0) == pytest.approx(0.25)
    assert times.usual_colocated("me", 200.0) == pytest.approx(0.75)


def test_the_last_minute_is_kept() -> None:
    times = times_of("d")
    for number in range(1000):
        times.begin("d", "a", number)
        times.end("d", "a", number + 0.25)
    assert times.mean_busy_colocated("me", 940.0, 1000.0) == pytest.approx(0.25)
    assert len(times._of_host["here"]._times_s) < 500


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 5), st.floats(0, 5)), max_size=20))
def test_the_mean_is_that_of_the_moments(stays: list[tuple[int, float, float]]) -> None:
    times, events = times_of("0", "1", "2"), []
    for number, (worker, begin_s, length_s) in enumerate(stays):
        events += [(begin_s, 0, worker, number), (begin_s + length_s, 1, worker, number)]
    for at_s, is_end, worker, number in sorted(events):
        (times.end if is_end else times.begin)(str(worker), str(number), at_s)
    moments = [(number + 0.5) / 100 for number in range(1000)]
    busy = sum(
        any(worker == one and begin_s <= at_s < begin_s + length_s for one, begin_s, length_s in stays)
        for worker in range(3)
        for at_s in moments
    )
    assert times.mean_busy_colocated("me", 0.0, 10.0) == pytest.approx(busy / 1000, abs=0.07)
