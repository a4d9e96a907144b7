"""What a link of known speed looks like to its estimator."""

from __future__ import annotations

import random

import pytest

from halfmoon.rpc.transport.estimate import LinkEstimate, LinkEstimator

MB = 1_000_000


def transfer(estimator: LinkEstimator, num_bytes: int, now_s: float, seconds: float, num_frames: int = 4) -> float:
    """One busy period of several frames; gives when it ended."""
    for _ in range(num_frames):
        estimator.sent(num_bytes // num_frames, now_s)
    for number in range(num_frames):
        estimator.consumed(num_bytes // num_frames, now_s + seconds * (number + 1) / num_frames)
    return now_s + seconds


def test_bytes_that_the_other_end_withdraws_end_no_period() -> None:
    estimator = LinkEstimator()
    estimator.sent(1000, 0.0)
    estimator.sent(3000, 0.0)
    estimator.consumed(1000, 1.0)
    estimator.withdrawn(2000, 1.0)
    assert estimator.estimate is None, "more is on its way"
    estimator.consumed(1000, 2.0)
    assert estimator.estimate == LinkEstimate(1000.0, 0.0)


def test_nothing_is_known_before_the_first_transfer() -> None:
    assert LinkEstimator().estimate is None


@pytest.mark.parametrize(("bandwidth", "latency_s"), [(10 * MB, 0.002), (200 * MB, 0.02), (2000 * MB, 0.0005)])
def test_rate_and_latency_come_out_of_transfers_of_many_sizes(bandwidth: int, latency_s: float) -> None:
    estimator, now_s, rng = LinkEstimator(), 7.0, random.Random(0)
    for _ in range(40):
        num_bytes = 4 * rng.randrange(50_000, 10 * MB)
        seconds = latency_s + num_bytes / bandwidth
        now_s = 3.0 + transfer(estimator, num_bytes, now_s, seconds)
    found = estimator.estimate
    assert found is not None
    assert found.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.01)
    assert found.latency_s == pytest.approx(latency_s, rel=0.05, abs=1e-5)


def test_one_size_alone_says_only_how_long_it_takes() -> None:
    estimator = LinkEstimator()
    for number in range(5):
        transfer(estimator, 8 * MB, float(number), 0.1)
    found = estimator.estimate
    assert found is not None
    assert found.bandwidth_bytes_per_s == pytest.approx(80 * MB)
    assert found.latency_s == 0.0


def test_one_size_and_round_trips_say_both() -> None:
    estimator, latency_s = LinkEstimator(), 0.02
    for number, waited_s in enumerate([0.5, 0.0, 0.03, 0.001, 0.2]):  # of a first connection, of a busy event loop
        estimator.answered(latency_s + waited_s)
        transfer(estimator, 8 * MB, float(number), latency_s + 0.08)
    found = estimator.estimate
    assert found is not None
    assert found.bandwidth_bytes_per_s == pytest.approx(100 * MB)
    assert found.latency_s == pytest.approx(latency_s)


def test_a_latency_of_many_round_trips_is_not_believed() -> None:
    estimator = LinkEstimator()
    estimator.answered(0.002)
    for number in range(20):  # a little less takes hardly less: what was slow was something else
        transfer(estimator, (8 + number % 2) * MB, float(number), 0.1 + 0.001 * (number % 2))
    found = estimator.estimate
    assert found is not None
    assert found.latency_s == pytest.approx(0.002)
    assert found.bandwidth_bytes_per_s == pytest.approx(8.5 * MB / 0.0985, rel=0.02)


def test_round_trips_alone_do_not_make_a_link_infinitely_fast() -> None:
    estimator = LinkEstimator()
    estimator.answered(1.0)
    assert estimator.estimate is None
    transfer(estimator, MB, 5.0, 0.1)
    found = estimator.estimate
    assert found is not None
    assert found.bandwidth_bytes_per_s == pytest.approx(20 * MB)
    assert found.latency_s == pytest.approx(0.05)


def test_a_link_that_changes_is_followed() -> None:
    estimator, now_s = LinkEstimator(), 0.0
    for mbps in (1000, 50):
        for number in range(40):
            num_bytes = 4 * MB * (1 + number % 3)
            now_s = 1.0 + transfer(estimator, num_bytes, now_s, num_bytes / (mbps * MB))
    found = estimator.estimate
    assert found is not None
    assert found.bandwidth_bytes_per_s == pytest.approx(50 * MB, rel=0.1)


def test_a_period_that_never_ends_still_counts() -> None:
    estimator, now_s = LinkEstimator(), 0.0
    estimator.sent(MB, now_s)
    for _ in range(200):
        estimator.sent(MB, now_s)
        now_s += 0.01
        estimator.consumed(MB, now_s)
    found = estimator.estimate
    assert found is not None
    assert found.bandwidth_bytes_per_s == pytest.approx(100 * MB, rel=0.01)


def test_what_was_lost_says_nothing() -> None:
    estimator = LinkEstimator()
    estimator.sent(MB, 0.0)
    estimator.lost(MB, 100.0)
    assert estimator.estimate is None
    transfer(estimator, MB, 200.0, 0.01)
    found = estimator.estimate
    assert found is not None
    assert found.bandwidth_bytes_per_s == pytest.approx(100 * MB)
