"""Latency models: exact data gives the model back, noise does not turn it negative, drift is followed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.latency import (
    PrefillModel,
    PrefillSample,
    StepModel,
    StepSample,
    fit_prefill,
    fit_step,
    normal_equations,
    profile_prefill,
    profile_step,
    step_equations,
)

LENGTHS = [(new, cached) for new in (1, 64, 500, 4096) for cached in (0, 64, 10_000)]
BATCHES = [(batch, batch * length) for batch in (1, 3, 16, 64) for length in (10, 400, 3000)]

COEFFICIENT = st.floats(0, 1) | st.just(0.0)


def prefills(model: PrefillModel, slower: float = 1.0) -> list[PrefillSample]:
    return [PrefillSample(new, cached, slower * model.seconds(new, cached)) for new, cached in LENGTHS]


def steps(model: StepModel, slower: float = 1.0) -> list[StepSample]:
    return [StepSample(batch, context, slower * model.seconds(batch, context)) for batch, context in BATCHES]


def test_the_formulas() -> None:
    assert PrefillModel(1, 2, 4).seconds(10, 5) == 1 + 20 + 4 * 10 * 10
    assert PrefillModel(1, 2, 4).seconds(0, 5) == 0
    assert StepModel(1, 2, 3).seconds(4, 5) == 1 + 8 + 15


@given(COEFFICIENT, COEFFICIENT, COEFFICIENT)
def test_exact_data_gives_the_model_back(a: float, b: float, c: float) -> None:
    prefill, step = PrefillModel(0.001 + a, b / 1e3, c / 1e6), StepModel(0.001 + a, b / 1e2, c / 1e5)
    for found, true in ((fit_prefill(prefills(prefill)), prefill), (fit_step(steps(step)), step)):
        assert found == pytest.approx(true, rel=1e-5, abs=1e-9)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 10**5), st.floats(1e-3, 10)), min_size=1, max_size=8))
def test_the_fit_is_the_best_non_negative_one(rows: list[tuple[int, int, float]]) -> None:
    samples = [StepSample(*row) for row in rows]
    found = np.array(fit_step(samples))
    assert (found >= 0).all()
    gram, moment = normal_equations(*step_equations(samples))
    slope = gram @ found - moment  # of half the cost: zero where positive, not falling elsewhere
    scale = np.sqrt(np.diag(gram)) * np.sqrt(len(rows))
    assert (slope / scale > -1e-3).all()
    assert abs(slope @ found) < 1e-3


def test_without_samples_or_variety() -> None:
    assert fit_prefill([]) == PrefillModel()
    same = fit_step([StepSample(4, 400, 0.5)] * 3)
    assert same.seconds(4, 400) == pytest.approx(0.5)


def test_a_profile_of_one_step_makes_no_token_free() -> None:
    """A worker that started beside others had time for one step."""
    model = profile_prefill([PrefillSample(64, 0, 0.6)])
    assert model.seconds(64) == pytest.approx(0.6)
    assert model.seconds(640) > 2 * model.seconds(64)
    step = profile_step([StepSample(1, 64, 0.02)])
    assert step.seconds(1, 64) == pytest.approx(0.02)
    assert step.seconds(64, 64_000) > step.seconds(1, 64)
    assert profile_prefill([]) == PrefillModel()
    assert profile_step([]) == StepModel()


def test_a_profile_of_many_steps_is_what_was_measured() -> None:
    true = PrefillModel(0.02, 1e-3, 2e-7)
    rows = [(64, 0), (512, 0), (256, 0), (512, 512), (512, 0)]
    model = profile_prefill([PrefillSample(*row, true.seconds(*row)) for row in rows])
    for row in rows:
        assert model.seconds(*row) == pytest.approx(true.seconds(*row), rel=0.05)


def test_a_profile_knows_of_attention_that_is_dearer_than_usual() -> None:
    """As on CPUs: prompts of 512 tokens measured it, and long ones depend on it."""
    true = PrefillModel(0.004, 4.5e-4, 2.7e-7)
    rows = [(64, 0), (512, 0), (256, 0), (512, 512), (64, 0), (512, 0)]
    model = profile_prefill([PrefillSample(*row, true.seconds(*row)) for row in rows])
    for row in ((80, 600), (80, 1900), (4000, 0)):
        assert model.seconds(*row) == pytest.approx(true.seconds(*row), rel=0.1)
