"""What a worker learns of a link to a holder, says of it, and hopes of it."""

from __future__ import annotations

import pytest

from halfmoon.worker.store.load_rate import LoadRate

USUAL = 1e-6  # seconds per byte


def reported(rate: LoadRate) -> float:
    assert rate.measured is not None
    return rate.measured.bandwidth_bytes_per_s


def test_the_gateway_hears_of_the_tier_that_was_used_last() -> None:
    rate = LoadRate()
    assert rate.measured is None, "a guess is no measurement"
    for _ in range(40):
        rate.observe("dram", 1000, 1e-3)
        rate.observe("cold", 1000, 1.0)
    assert reported(rate) == pytest.approx(1e3, rel=0.01)
    rate.observe("dram", 1000, 0.0)  # no time passed: nothing is known of it
    assert reported(rate) == pytest.approx(1e3, rel=0.01)
    rate.observe("dram", 1000, 1e-3)
    assert reported(rate) == pytest.approx(1e6, rel=0.01)


def test_what_was_measured_first_replaces_the_guess() -> None:
    rate = LoadRate()
    assert rate.s_per_byte(["dram"], USUAL) == USUAL
    assert rate.s_per_byte(["cold"], 1e-9) == 2e-8, "a slow tier is slow over any link"
    rate.observe("dram", 1000, 1e-2)
    assert rate.s_per_byte(["dram"], USUAL) == pytest.approx(1e-5)
    rate.observe("dram", 1000, 2e-2)
    assert rate.s_per_byte(["dram"], USUAL) == pytest.approx(1.3e-5)


def test_a_holder_that_was_slow_once_is_hoped_to_be_quicker_and_not_said_to_be() -> None:
    rate = LoadRate()
    rate.observe("cold", 1000, 1e-9)
    rate.observe("dram", 1000, 10.0)
    rate.note_passed_over()
    assert 0.01 > rate.s_per_byte(["dram"], USUAL) > 0.009
    assert reported(rate) == pytest.approx(100.0)
    for _ in range(400):
        rate.note_passed_over()
    assert rate.s_per_byte(["dram"], USUAL) == pytest.approx(1e-9)
    assert rate.s_per_byte(["cold"], USUAL) == pytest.approx(1e-12), "quicker than can be hoped for"
    assert reported(rate) == pytest.approx(100.0)
    rate.note_late()
    assert rate.s_per_byte(["dram"], USUAL) == pytest.approx(0.01), "the hope was vain"


def test_a_holder_that_was_never_asked_is_hoped_to_be_quicker_than_others() -> None:
    rate = LoadRate()
    for _ in range(10):
        rate.note_passed_over()
    assert rate.s_per_byte(["dram"], USUAL) == pytest.approx(USUAL * 0.95**10)
    assert rate.measured is None
