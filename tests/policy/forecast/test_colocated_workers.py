"""Who of the workers on one host will be busy, and how long work takes beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.forecast.colocated_workers import BusySpan, Decoding
from tests.policy.busy_host import beside

spans = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: (min(pair), max(pair))), max_size=4)


def done_alone_s(by_row: Mapping[int, Sequence[BusySpan]], begin_s: int, end_s: float, contention: float) -> float:
    """How much work is done between two whole seconds, or the first and the end of the world."""
    done_s = 0.0
    for second in range(begin_s, math.ceil(end_s)):
        busy = sum(any(since <= second < until for since, until in of_row) for of_row in by_row.values())
        done_s += min(end_s - second, 1.0) / (1 + contention * busy)
    return done_s


@given(st.dictionaries(st.integers(0, 3), spans), st.lists(st.floats(0, 4), min_size=1, max_size=4), st.floats(0.1, 2))
def test_work_is_done_as_the_busy_ones_leave_it_time(
    by_row: Mapping[int, Sequence[BusySpan]], works_s: Sequence[float], contention: float
) -> None:
    neighbours, now_s = beside(by_row), 0.0
    for work_s in works_s:
        now_s = neighbours.after(work_s, now_s, contention)
    assert done_alone_s(by_row, 0, now_s, contention) == pytest.approx(sum(works_s))


def test_more_work_makes_a_busy_worker_no_busier() -> None:
    neighbours = beside({7: [(0.0, 2.0), (1.0, 2.0)], 8: []})
    assert neighbours.after(0.5, 0.0, 1.0) == 1.0
    neighbours.begin_decode(Decoding(7, 2.0), 1.0)  # until 3, now
    neighbours.begin_decode(Decoding(9, 9.0), 1.0)  # no neighbour
    assert neighbours.after(1.0, 1.0, 1.0) == 3.0
    neighbours.begin_decode(Decoding(8, 1.0), 3.0)
    assert neighbours.after(1.0, 3.0, 1.0) == 4.5
    assert beside({7: [(0.0, 9.0)]}).after(2.0, 0.0, 0.0) == 2.0


@given(
    st.dictionaries(st.integers(0, 2), spans),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(0, 9)), max_size=6).map(sorted),
)
def test_decodes_that_begin_later_are_added_to_what_is_known(
    by_row: Mapping[int, Sequence[BusySpan]], begun: Sequence[tuple[int, int, int]]
) -> None:
    neighbours = beside({row: [] for row in range(3)} | dict(by_row))
    busy = {
        row: [*by_row.get(row, ()), *((at, at + length) for at, one, length in begun if one == row)] for row in range(3)
    }
    for begin_s, row, length_s in begun:
        neighbours.begin_decode(Decoding(row, length_s), begin_s)
    found_s = neighbours.after(5.0, 0.0, 1.0)
    assert done_alone_s(busy, 0, found_s, 1.0) == pytest.approx(5.0)


def test_a_step_may_end_with_thousands_of_prompts() -> None:
    neighbours = beside({7: [(0.0, 2.0)]})
    for number in range(50_000):
        neighbours.begin_decode(Decoding(7, 3.0 + number % 1000), 1.0)
    assert neighbours.after(2.0, 1000.0, 1.0) == 1003.5


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 9)), max_size=300), st.floats(0.01, 3), st.floats(0.01, 2))
def test_of_hundreds_the_slowdown_is_right_within_a_32nd(
    lives: Sequence[BusySpan], work_s: float, contention: float
) -> None:
    by_row = {row: [(begin_s, begin_s + length_s)] for row, (begin_s, length_s) in enumerate(lives)}
    found_s = beside(by_row).after(work_s, 0.0, contention)
    edges = sorted({0.0, found_s, *(one for of_row in by_row.values() for one in of_row[0] if 0.0 < one < found_s)})
    done_s = sum(
        (until_s - since_s) / (1 + contention * sum(one[0][0] <= since_s < one[0][1] for one in by_row.values()))
        for since_s, until_s in pairwise(edges)
    )
    assert done_s == pytest.approx(work_s, rel=1 / 31)
