"""Pieces through measured points: exact at the points, between them in between, never falling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.latency import PrefillModel, StepSample
from halfmoon.sim.latency_sources.interpolation import PromptsSample, prefill_pieces, step_pieces
from halfmoon.sim.latency_sources.latency_model import LatencyModel, Piece

SIZES = st.lists(st.integers(1, 4000), min_size=3, max_size=12, unique=True).map(sorted)


def model(prompts: list[PromptsSample], steps: list[StepSample]) -> LatencyModel:
    return LatencyModel(prefill_pieces(prompts, prompts)[0], step_pieces(steps, steps)[0], 1000, 1.0, "test")


def linear(sizes: list[int]) -> LatencyModel:
    prompts = [PromptsSample(new, new * new / 2, 0.01 + 1e-4 * new + 1e-8 * new * new / 2) for new in sizes]
    steps = [StepSample(size, size * 100 * size, 0.02 + 1e-3 * size + 1e-7 * size * 100 * size) for size in sizes]
    return model(prompts, steps)


@given(SIZES, st.floats(0, 1))
def test_a_worker_with_three_coefficients_is_found_again(sizes: list[int], share: float) -> None:
    found = linear(sizes)
    new = sizes[0] + share * (sizes[-1] - sizes[0])
    assert found.stage_s(new, new * new / 2, 0, 0) == pytest.approx(0.01 + 1e-4 * new + 1e-8 * new * new / 2, rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(1e-4, 1.0)), min_size=3, max_size=12))
def test_larger_batches_never_take_less(points: list[tuple[int, float]]) -> None:
    steps = [StepSample(batch, 10 * batch, seconds) for batch, seconds in points]
    pieces, error = step_pieces(steps, steps)
    (f,) = {piece.model.f for piece in pieces}
    found = LatencyModel((Piece(0, PrefillModel()),), pieces, 1000, 1.0, "test")
    seconds = [found.stage_s(0, 0, batch, 0) for batch in range(1, 600, 7)]
    assert seconds == pytest.approx(sorted(seconds), abs=1e-9)
    assert f >= 0
    assert error >= 0


def test_the_error_is_that_of_held_out_points() -> None:
    steps = [StepSample(batch, 0, 0.01 * batch) for batch in (1, 2, 4, 8)]
    assert step_pieces(steps, [StepSample(3, 0, 0.03)])[1] == pytest.approx(0.0, abs=1e-6)
    assert step_pieces(steps, [StepSample(3, 0, 0.06)])[1] == pytest.approx(0.5, abs=1e-6)
    prompts = [PromptsSample(new, 0.0, 1e-3 * new) for new in (16, 32, 64)]
    assert prefill_pieces(prompts, [PromptsSample(48, 0.0, 0.096)])[1] == pytest.approx(0.5, abs=1e-6)


def test_equal_sizes_count_by_their_median() -> None:
    steps = [StepSample(1, 0, 0.01), StepSample(2, 0, 0.02), StepSample(2, 0, 0.021), StepSample(2, 0, 5.0)]
    pieces, _ = step_pieces([*steps, StepSample(4, 0, 0.04)], steps)
    (at_two,) = [piece for piece in pieces if piece.least == 2]
    assert at_two.model.seconds(2, 0) == pytest.approx(0.021)
