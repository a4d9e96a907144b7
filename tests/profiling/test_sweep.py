"""The points of a sweep are within the worker's limits, whatever these are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.profiling.sweep import SweepLimits, batch_points, prompt_points, transfer_points
from halfmoon.profiling.target import Target
from tests.profiling.profiling_fakes import target

TARGETS = st.builds(
    lambda kv, context, running: target(kv_tokens=kv, context_tokens=context, max_running=running),
    st.integers(64, 100_000), st.integers(64, 9000), st.integers(1, 300),
)  # fmt: skip
LIMITS = st.builds(
    SweepLimits, st.integers(32, 9000), st.integers(1, 300), st.integers(1, 9000), st.integers(1, 3), st.integers(1, 12)
)


@given(TARGETS, LIMITS)
def test_prompts_fit_and_are_measured_once(worker: Target, limits: SweepLimits) -> None:
    points = list(prompt_points(worker, limits))
    assert points
    for point in points:
        assert point.new_tokens >= 1
        total = point.new_tokens + point.cached_tokens
        assert total <= min(limits.longest_prompt, worker.context_tokens - 2)
        assert point.cached_tokens % worker.layout.block_tokens == 0
    assert len({point[:2] for point in points if not point.is_held_out}) == len(
        [point for point in points if not point.is_held_out]
    )
    fitted = {point.new_tokens for point in points if not point.is_held_out and not point.cached_tokens}
    held_out = {point.new_tokens for point in points if point.is_held_out and not point.cached_tokens}
    assert not fitted & held_out
    assert not held_out or min(fitted) < min(held_out) <= max(held_out) < max(fitted)


@given(TARGETS, LIMITS)
def test_batches_fit_in_memory_and_in_the_context(worker: Target, limits: SweepLimits) -> None:
    for point in batch_points(worker, limits):
        assert 1 <= point.batch <= min(limits.largest_batch, worker.max_running)
        assert point.batch * point.context_tokens <= worker.kv_tokens
        assert point.context_tokens + limits.steps <= worker.context_tokens


@given(TARGETS, LIMITS)
def test_transfers_ascend_and_fit(worker: Target, limits: SweepLimits) -> None:
    points = list(transfer_points(worker, limits))
    assert points == sorted(set(points))
    assert max(points) <= min(limits.longest_prompt, worker.context_tokens - 2)


def test_every_other_length_is_held_out() -> None:
    points = list(prompt_points(target(kv_tokens=10_000, context_tokens=2050), SweepLimits(longest_prompt=512)))
    alone = [(point.new_tokens, point.is_held_out) for point in points if not point.cached_tokens]
    assert [length for length, is_held_out in alone if is_held_out] == [96, 192, 384]
    assert [length for length, is_held_out in alone if not is_held_out] == [16, 32, 64, 128, 256, 512]
