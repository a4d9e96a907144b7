"""A restore on its way, simulated: never worse than the better single method by more than a chunk, whatever happens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.latency import PrefillModel
from halfmoon.policy.restore_course import RestoreCourse

BLOCK_TOKENS, CHUNK_TOKENS = 64, 512
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
LOADS_AT_ONCE = 2


class Simulated:
    """A worker and a link of the given speeds; time goes on in small steps."""

    def __init__(self, course: RestoreCourse, compute_s: float, load_s: float, dead_after_s: float) -> None:
        self.course = course
        self.compute_s, self.load_s, self.dead_after_s = compute_s, load_s, dead_after_s  # a block
        self.loaded: set[int] = set()
        self.loads: list[list[int]] = []
        self.link_free_s = 0.0
        self.num_computed = 0
        self.chunk: tuple[int, float] | None = None  # where it ends, when

    def run(self) -> float:
        """When everything is there."""
        now_s, tick_s = 0.0, min(self.compute_s, self.load_s) / 3
        self.course.progress(0, 0.0)
        while self.num_computed < self.course.num_blocks:
            now_s += tick_s
            self._load(now_s)
            self._compute(now_s)
            fence = self.course.wanted_fence(now_s)
            self.course.fence = max(fence, self.num_computed, self.chunk[0] if self.chunk else 0)
        return now_s

    def _load(self, now_s: float) -> None:
        while len(self.loads) < LOADS_AT_ONCE and (blocks := self.course.claim(now_s)):
            assert all(self.course.fence <= block not in self.loaded for block in blocks)
            self.link_free_s = max(self.link_free_s, now_s) if not self.loads else self.link_free_s
            self.loads.append(blocks)
        if not self.loads or now_s >= self.dead_after_s:
            return
        if now_s >= self.link_free_s + self.load_s * len(self.loads[0]):
            blocks = self.loads.pop(0)
            self.link_free_s = now_s
            self.course.came(blocks, now_s)
            self.loaded.update(block for block in blocks if block >= self.course.fence)

    def _compute(self, now_s: float) -> None:
        if self.chunk is not None and now_s >= self.chunk[1]:
            self.num_computed, self.chunk = self.chunk[0], None
        if self.chunk is None:
            while self.num_computed in self.loaded:
                self.num_computed += 1
            self.course.progress(self.num_computed * BLOCK_TOKENS, now_s)
            end = min(self.num_computed + CHUNK_BLOCKS, self.course.fence)
            if end > self.num_computed:
                self.chunk = end, now_s + (end - self.num_computed) * self.compute_s


def course_of(num_blocks: int, compute_s: float, load_s: float) -> RestoreCourse:
    """Expects these seconds a block."""
    course = RestoreCourse(num_blocks, BLOCK_TOKENS, CHUNK_TOKENS, PrefillModel(0, compute_s / BLOCK_TOKENS), load_s)
    course.begin(0, course.costs(0, load_s, 0.0))
    return course


@pytest.mark.parametrize("load_s", [0.15, 0.1, 0.05, 0.03, 0.007])
def test_both_sides_meet_where_they_should(load_s: float) -> None:
    num_blocks, compute_s = 62, 0.1
    took_s = Simulated(course_of(num_blocks, compute_s, load_s), compute_s, load_s, math.inf).run()
    together_s = num_blocks / (1 / compute_s + 1 / load_s)
    better_s = num_blocks * min(compute_s, load_s)
    assert took_s <= together_s + 3 * compute_s + 3 * load_s
    assert took_s <= better_s * 1.05 + compute_s


seconds = st.floats(0.002, 0.5)


@given(st.integers(1, 100), seconds, seconds, seconds, seconds)
def test_wrong_predictions_cost_no_more_than_a_chunk(
    num_blocks: int, compute_s: float, load_s: float, expected_compute_s: float, expected_load_s: float
) -> None:
    course = course_of(num_blocks, compute_s, expected_load_s)
    took_s = Simulated(course, compute_s, load_s, math.inf).run()
    better_s = num_blocks * min(compute_s, load_s)
    assert took_s <= better_s * 1.1 + (CHUNK_BLOCKS + 2) * compute_s + 4 * max(load_s, expected_load_s) + 0.3


@given(st.integers(1, 60), st.floats(0.01, 0.2), st.floats(0.0, 2.0))
def test_a_link_that_dies_leaves_the_rest_to_computing(num_blocks: int, compute_s: float, dead_after_s: float) -> None:
    course = course_of(num_blocks, compute_s, 0.02)
    took_s = Simulated(course, compute_s, 0.02, dead_after_s).run()
    assert took_s <= num_blocks * compute_s + dead_after_s + 1.5


def test_little_is_asked_for_before_the_link_is_known() -> None:
    course = course_of(40, 1.0, 0.001)
    assert [len(course.claim(0.0)), len(course.claim(0.0))] == [1, 1]
    course.came([39, 38], 0.002)
    assert course.claim(0.002) == [37, 36]
    course.failed([37, 36])
    assert course.num_loaded == 2
    assert course.load_s_per_block == pytest.approx(0.001)


def test_a_single_method_is_preferred_where_both_save_little() -> None:
    plans = []
    for compute_s, load_s in ((0.1, 0.001), (0.001, 0.1), (0.1, 0.1)):
        course = RestoreCourse(20, BLOCK_TOKENS, CHUNK_TOKENS, PrefillModel(0, compute_s / BLOCK_TOKENS), load_s)
        plans.append(course.begin(4, course.costs(0, load_s, 0.0)).method)
    assert plans == ["load", "compute", "both"]
