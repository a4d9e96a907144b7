"""What a worker learns of its store's link, and says of it."""

from __future__ import annotations

import pytest

from halfmoon.worker.store.load_rate import LoadRate


def test_the_gateway_hears_of_the_tier_that_was_used_last() -> None:
    rate = LoadRate()
    assert rate.link.bandwidth_bytes_per_s == pytest.approx(1 / rate.s_per_byte(["dram"]))
    for _ in range(40):
        rate.observe("dram", 1000, 1e-3)
        rate.observe("cold", 1000, 1.0)
    assert rate.link.bandwidth_bytes_per_s == pytest.approx(1e3, rel=0.01)
    rate.observe("dram", 1000, 0.0)  # no time passed: nothing is known of it
    assert rate.link.bandwidth_bytes_per_s == pytest.approx(1e3, rel=0.01)
    rate.observe("dram", 1000, 1e-3)
    assert rate.link.bandwidth_bytes_per_s == pytest.approx(1e6, rel=0.01)


def test_what_was_measured_first_replaces_the_guess() -> None:
    rate = LoadRate()
    rate.observe("dram", 1000, 1e-3)
    assert rate.s_per_byte(["dram"]) == pytest.approx(1e-6)
    rate.observe("dram", 1000, 2e-3)
    assert rate.s_per_byte(["dram"]) == pytest.approx(1.3e-6)


def test_a_holder_that_was_slow_once_is_tried_again() -> None:
    rate = LoadRate()
    guess = rate.s_per_byte(["dram"])
    rate.observe("dram", 1000, 10.0)
    rate.observe("cold", 1000, 1e-9)
    slow, quick = rate.s_per_byte(["dram"]), rate.s_per_byte(["cold"])
    rate.note_passed_over({"dram", "cold"})
    assert slow > rate.s_per_byte(["dram"]) > 0.9 * slow
    for _ in range(400):
        rate.note_passed_over({"dram", "cold"})
    assert rate.s_per_byte(["dram"]) == pytest.approx(guess)
    assert rate.s_per_byte(["cold"]) == quick  # quicker than the guess: nothing to hope for
