"""When a prefix is copied to the store near which it is asked for."""

from __future__ import annotations

from halfmoon.policy.placement.replication import Replication

RATE = 100.0  # bytes per second: 1,000 at once


def test_the_second_use_near_a_store_makes_a_copy_and_the_next_ones_do_not() -> None:
    rule = Replication(RATE)
    assert rule.decide("a:1", 7, 1.0, 500, 0.0) == "cold"
    assert rule.decide("a:1", 7, 2.0, 0, 0.0) == "here"
    assert rule.decide("a:1", 7, 2.0, 500, 0.0) == "copy"
    assert rule.decide("a:1", 7, 3.0, 500, 1.0) == "asked"
    assert rule.decide("b:1", 7, 2.0, 500, 1.0) == "copy"
    assert rule.decide("a:1", 7, 4.0, 500, 61.0) == "copy", "it was refused, or is gone again"


def test_the_rate_of_copies_is_bounded() -> None:
    rule, copied, now_s = Replication(RATE), 0.0, 0.0
    for number in range(1000):
        now_s = number * 0.5
        copied += 300 if rule.decide("a:1", number, 5.0, 300, now_s) == "copy" else 0
    assert 0.9 * RATE * now_s < copied <= RATE * now_s + 10 * RATE


def test_a_prefix_larger_than_the_bound_is_copied_after_a_pause() -> None:
    rule = Replication(RATE)
    assert rule.decide("a:1", 1, 5.0, 5000, 0.0) == "copy"
    assert rule.decide("a:1", 2, 5.0, 10, 20.0) == "bandwidth"
    assert rule.decide("a:1", 2, 5.0, 10, 60.0) == "copy"
