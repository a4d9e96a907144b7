"""What guessed tokens do to steps, and to the time between tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.latency import StepModel
from halfmoon.policy.models.measured_step import MeasuredStep
from halfmoon.policy.models.refinement import WorkerLatency
from halfmoon.policy.models.speculation import LearnedSpeculation, SpeculationRates

TRUE = StepModel(0.01, 0.002, 1e-6)


def steps(num: int, batch: int, drafts: int, right: int) -> list[MeasuredStep]:
    """Steps whose time follows from their rows."""
    context = 300 * batch
    seconds = TRUE.seconds(batch + drafts, context)
    return [MeasuredStep(batch, context, seconds, drafts=drafts, right_drafts=right)] * num


def test_without_guesses_a_token_takes_a_step() -> None:
    assert SpeculationRates().per_token(TRUE) == TRUE
    assert SpeculationRates().tokens_per_step == 1
    learned = LearnedSpeculation()
    learned.observe([MeasuredStep(0, 0, 0.1, 100, 5000.0), MeasuredStep(3, 30, 0.1)])
    assert learned.rates == SpeculationRates()


@given(st.integers(1, 64), st.integers(0, 64), st.integers(0, 100))
def test_the_time_of_a_step_is_shared_by_the_tokens_that_it_gives(batch: int, drafts: int, percent: int) -> None:
    right = drafts * percent // 100
    rates = SpeculationRates(drafts / batch, right / batch)
    step_s = TRUE.seconds(batch + drafts, 300 * batch)
    assert rates.per_token(TRUE).seconds(batch, 300 * batch) == pytest.approx(step_s * batch / (batch + right))


def test_late_steps_count() -> None:
    learned = LearnedSpeculation()
    learned.observe(steps(500, 2, 8, 6))
    assert learned.rates.drafts == pytest.approx(4)
    assert learned.rates.right == pytest.approx(3)
    learned.observe(steps(500, 2, 0, 0))
    assert learned.rates.tokens_per_step == pytest.approx(1, abs=0.01)


def test_when_guesses_cease_the_step_is_known_all_the_same() -> None:
    """A model of seconds per token would have to be learned anew: it was three times as quick."""
    latency = WorkerLatency(step=StepModel(0.02, 0.004, 2e-6))
    for part in (steps(400, 2, 8, 6), steps(400, 1, 2, 1), steps(150, 2, 0, 0)):
        latency.observe(part)
    assert latency.step.seconds(2, 600) == pytest.approx(TRUE.seconds(2, 600), rel=0.05)
    assert latency.tbt.seconds(2, 600) == pytest.approx(TRUE.seconds(2, 600), rel=0.1)
    assert latency.step.seconds(10, 600) == pytest.approx(TRUE.seconds(10, 600), rel=0.1)
