"""Load shedding: the lowest class first, then one more at a time, and only for a while."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.admission.shedding import Shedding

PRIORITIES = (0, 5, 9)


def shed(shedding: Shedding, now_s: float) -> list[int]:
    return [priority for priority in PRIORITIES if shedding.left_s(priority, now_s) > 0]


def test_the_lowest_class_first_and_the_next_one_if_that_does_not_help() -> None:
    shedding = Shedding()
    assert shed(shedding, 0.0) == []
    shedding.shed(0, PRIORITIES, 0.0)
    assert shed(shedding, 0.0) == [9]
    shedding.shed(0, PRIORITIES, 0.9)  # its absence has had no time to show
    assert shed(shedding, 0.9) == [9]
    shedding.shed(0, PRIORITIES, 1.0)
    assert shed(shedding, 1.0) == [5, 9]
    shedding.shed(0, PRIORITIES, 2.0)  # no further class is below
    assert shed(shedding, 2.0) == [5, 9]


def test_classes_return_five_seconds_after_the_latest_refusal() -> None:
    shedding = Shedding()
    shedding.shed(0, PRIORITIES, 0.0)
    shedding.shed(0, PRIORITIES, 0.5)
    assert shedding.left_s(9, 3.0) == pytest.approx(2.5)
    assert shed(shedding, 5.5) == []
    shedding.shed(0, PRIORITIES, 6.0)
    assert shed(shedding, 6.0) == [9]  # it starts with the lowest again


def test_the_lowest_class_sheds_none() -> None:
    shedding = Shedding()
    shedding.shed(9, PRIORITIES, 0.0)
    assert shed(shedding, 0.0) == []


@given(st.lists(st.tuples(st.sampled_from(PRIORITIES), st.floats(0, 3)), max_size=20))
def test_a_class_never_sheds_itself_or_one_above(refusals: list[tuple[int, float]]) -> None:
    shedding, now_s, most_urgent = Shedding(), 0.0, max(PRIORITIES)
    for priority, passed_s in refusals:
        now_s += passed_s
        most_urgent = min(most_urgent, priority)
        shedding.shed(priority, PRIORITIES, now_s)
        assert all(outside > most_urgent for outside in shed(shedding, now_s))
        assert sorted(shed(shedding, now_s), reverse=True) == list(reversed(PRIORITIES))[: len(shed(shedding, now_s))]
