"""How a prompt is cut over workers that compute it together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.latency import PrefillModel
from halfmoon.policy.models.segments import MAX_ROUND_S, SEGMENT_OVERHEAD_S, SegmentPlan, SegmentWorker, plan_segments

MODEL = PrefillModel(0.005, 1e-4, 1e-8)
ALIKE = SegmentWorker(MODEL, 2048)
BLOCK = 64

models = st.builds(
    PrefillModel, st.floats(0, 0.05), st.floats(1e-6, 1e-3), st.one_of(st.just(0.0), st.floats(1e-12, 1e-7))
)
workers = st.lists(
    st.builds(SegmentWorker, models, st.integers(1, 4096), st.floats(0, 3), st.floats(0, 1e-5)), min_size=2, max_size=8
)


@dataclass(frozen=True)
class Segment:
    worker: SegmentWorker
    start: int
    end: int

    @property
    def seconds(self) -> float:
        return self.worker.model.seconds(self.end - self.start, self.start)


def segments(plan: SegmentPlan, of: list[SegmentWorker], start: int) -> list[Segment]:
    cuts = enumerate(pairwise((start, *plan.ends)))
    return [Segment(of[number % plan.degree], first, last) for number, (first, last) in cuts]


@given(workers, st.integers(1, 200_000), st.integers(0, 100_000), st.sampled_from((1, 16, 64)))
def test_segments_are_whole_blocks_within_steps_and_the_last_worker_ends(
    of: list[SegmentWorker], num_new: int, num_cached: int, block_tokens: int
) -> None:
    num_tokens = num_cached + num_new
    plan = plan_segments(of, num_tokens, num_cached, block_tokens, 16)
    if plan is None:
        return
    parts = segments(plan, of, num_cached // block_tokens * block_tokens)
    assert plan.ends[-1] == num_tokens
    assert len(parts) == plan.degree * plan.num_rounds
    for part in parts:
        assert 0 < part.end - part.start <= part.worker.step_tokens
        assert part.seconds <= plan.round_s <= MAX_ROUND_S
    assert all(end % block_tokens == 0 for end in plan.ends[:-1])
    own_s = [sum(part.seconds for part in parts[number :: plan.degree]) for number in range(plan.degree)]
    assert plan.seconds >= max(worker.ready_s for worker in of) + max(own_s)


@given(st.integers(2, 8), st.integers(8, 300))
def test_equal_workers_compute_as_long_as_each_other(degree: int, num_blocks: int) -> None:
    num_tokens = num_blocks * degree * 16
    plan = plan_segments([ALIKE] * degree, num_tokens, 0, 16, 16)
    assert plan is not None
    block_s = MODEL.b * 16 + MODEL.c * 16 * num_tokens
    parts = segments(plan, [ALIKE] * degree, 0)
    lengths = [part.end - part.start for part in parts[:-1]]
    for part, length in zip(parts[:-1], lengths, strict=True):
        assert part.seconds >= plan.round_s - 2 * block_s - 1e-6 or length == ALIKE.step_tokens
    assert all(later <= before + 16 for before, later in pairwise(lengths)), "later ones attend to more"


def test_a_long_prompt_takes_as_many_rounds_as_steps_allow() -> None:
    plan = plan_segments([ALIKE] * 4, 31_000, 0, BLOCK, 16)
    assert plan is not None
    assert plan.num_rounds in (4, 5)
    full = plan_segments([ALIKE] * 4, 8_192, 0, BLOCK, 16)
    assert full is not None
    assert full.num_rounds == 2, "in one round of full steps the last segment would take longest"
    few = plan_segments([ALIKE] * 4, 5_000, 0, BLOCK, 16)
    assert few is not None
    assert few.num_rounds == 1


def test_slow_workers_with_long_steps_compute_more_rounds() -> None:
    """A segment that takes longer than its readers wait would be computed by each of them."""
    slow = SegmentWorker(PrefillModel(0.005, 0.03, 1e-8), 8_192)
    plan = plan_segments([slow] * 2, 16_000, 0, BLOCK, 16)
    assert plan is not None
    assert plan.round_s <= MAX_ROUND_S
    assert plan.num_rounds in (13, 14)


def test_a_quicker_worker_computes_more() -> None:
    slow, quick = SegmentWorker(MODEL.scaled(3), 2048), ALIKE
    plan = plan_segments([slow, quick], 2_800, 0, BLOCK, 16)
    assert plan is not None
    assert sum(plan.ends[::2]) - sum((0, *plan.ends[1::2])[: plan.num_rounds]) < 0.3 * 2_800


def test_what_all_have_is_not_computed() -> None:
    plan = plan_segments([ALIKE] * 2, 4_000, 2_003, BLOCK, 16)
    assert plan is not None
    (first, last) = plan.ends
    assert 1_984 < first < 3_100
    assert last == 4_000


@pytest.mark.parametrize(
    ("of", "num_tokens"),
    [([ALIKE], 4_000), ([ALIKE, ALIKE], 0), ([ALIKE, ALIKE], 60), ([SegmentWorker(MODEL, 40)] * 2, 4_000)],
    ids=["one worker", "no token", "less than a block", "steps of less than a block"],
)
def test_what_cannot_be_shared(of: list[SegmentWorker], num_tokens: int) -> None:
    assert plan_segments(of, num_tokens, 0, BLOCK, 16) is None


def test_a_slow_link_and_few_passes_make_all_of_it_slower() -> None:
    near = plan_segments([ALIKE] * 3, 5_000, 0, BLOCK, 16)
    far = plan_segments([SegmentWorker(MODEL, 2048, 0.0, 1e-3)] * 3, 5_000, 0, BLOCK, 16)
    coarse = plan_segments([ALIKE] * 3, 5_000, 0, BLOCK, 1)
    late = plan_segments([ALIKE, ALIKE, SegmentWorker(MODEL, 2048, 2.0)], 5_000, 0, BLOCK, 16)
    assert near is not None
    assert far is not None
    assert coarse is not None
    assert late is not None
    assert near.seconds == pytest.approx(near.round_s + SEGMENT_OVERHEAD_S + 2 * near.round_s / 16)
    assert near.seconds + 0.05 < coarse.seconds <= near.seconds + 2 * near.round_s * 15 / 16 + 1e-9
    assert late.seconds == pytest.approx(near.seconds + 2)
    assert far.seconds > 3_000 * 1e-3
