"""Refinement: models follow measurements, ignore pauses, and know their errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.latency import PrefillModel, PrefillSample, StepModel, StepSample, prefill_shape
from halfmoon.policy.models.refinement import PredictionErrors, RecursiveFit, WorkerLatency

LENGTHS = [(new, cached) for new in (1, 64, 500, 4096) for cached in (0, 64, 10_000)]
BATCHES = [(batch, batch * length) for batch in (1, 3, 16, 64) for length in (10, 400, 3000)]


def prefills(model: PrefillModel) -> list[PrefillSample]:
    return [PrefillSample(new, cached, model.seconds(new, cached)) for new, cached in LENGTHS]


def steps(model: StepModel, slower: float = 1.0) -> list[StepSample]:
    return [StepSample(batch, context, slower * model.seconds(batch, context)) for batch, context in BATCHES]


def test_measurements_replace_a_wrong_start() -> None:
    start, true = PrefillModel(0.01, 1e-4, 1e-9), PrefillModel(0.02, 3e-4, 2e-8)
    latency = WorkerLatency(start, StepModel(0.01, 1e-3, 1e-6))
    for _ in range(30):
        latency.observe_prefills(prefills(true))
    for new, cached in LENGTHS:
        assert latency.prefill.seconds(new, cached) == pytest.approx(true.seconds(new, cached), rel=0.1)
    assert latency.step == pytest.approx(StepModel(0.01, 1e-3, 1e-6), rel=1e-3)  # nobody measured it
    latency.observe_steps(steps(StepModel(0.02, 2e-3, 2e-6)) * 30)
    assert latency.step.seconds(16, 4000) == pytest.approx(0.06, rel=0.1)


def test_what_was_measured_lately_counts() -> None:
    latency, true = WorkerLatency(), StepModel(0.01, 1e-3, 1e-6)
    latency.observe_steps(steps(true) * 50)
    latency.observe_steps(steps(true, slower=2) * 200)
    assert latency.step.seconds(16, 4000) == pytest.approx(2 * true.seconds(16, 4000), rel=0.05)


def test_a_start_extrapolates_where_all_prompts_are_alike() -> None:
    start = PrefillModel(0.01, 1e-4, 1e-8)
    latency = WorkerLatency(start)
    latency.observe_prefills([PrefillSample(512, 0, 2 * start.seconds(512))] * 200)
    assert latency.prefill.seconds(512) == pytest.approx(2 * start.seconds(512), rel=0.05)
    assert latency.prefill.seconds(4096) > start.seconds(4096)


def test_a_pause_of_the_machine_is_not_the_work() -> None:
    latency = WorkerLatency(PrefillModel(0, 1e-3, 0))
    latency.observe_prefills([PrefillSample(100, 0, 0.1)] * 100)
    latency.observe_prefills([PrefillSample(100, 0, 3600.0)])
    assert latency.prefill.seconds(100) == pytest.approx(0.1)


def test_a_start_that_is_wrong_by_far_is_left_behind() -> None:
    latency = WorkerLatency(PrefillModel(0, 1e-6, 0))
    for _ in range(100):
        latency.observe_prefills([PrefillSample(100, 0, 1.0)] * 10)
    assert latency.prefill.seconds(100) == pytest.approx(1.0, rel=0.1)


def test_what_is_no_measurement_changes_nothing() -> None:
    latency = WorkerLatency(PrefillModel(0, 1e-3, 0), StepModel(0.01))
    latency.observe_prefills([PrefillSample(0, 10, 1.0), PrefillSample(5, 0, 0.0)])
    latency.observe_steps([StepSample(0, 0, 0.01), StepSample(1, 1, 0.0)])
    assert latency.prefill.seconds(50) == pytest.approx(0.05)
    assert latency.step.seconds(9, 9) == pytest.approx(0.01)


def test_a_first_measurement_during_a_pause_leaves_the_start() -> None:
    start = PrefillModel(0.01, 1e-4, 1e-8)
    latency = WorkerLatency(start)
    latency.observe_prefills([PrefillSample(100, 0, 100 * start.seconds(100))])
    assert latency.prefill == start


def test_errors() -> None:
    errors = PredictionErrors(window=3)
    assert errors.figures().num == 0
    for predicted_s, measured_s in ((9.0, 1.0), (1.1, 1.0), (0.8, 1.0), (1.0, 0.0), (1.5, 1.0)):
        errors.add(predicted_s, measured_s)
    figures = errors.figures()
    assert figures.num == 3
    assert figures.mean_absolute == pytest.approx((0.1 + 0.2 + 0.5) / 3)
    assert figures.median_absolute == pytest.approx(0.2)
    assert figures.bias == pytest.approx((0.1 - 0.2 + 0.5) / 3)


def test_a_worker_counts_its_errors() -> None:
    latency = WorkerLatency(PrefillModel(0, 1e-3, 0))
    latency.observe_prefills([PrefillSample(100, 0, 0.2)])
    assert latency.errors["prefill"].bias == pytest.approx(-0.5)
    latency.observe_steps([StepSample(1, 1, 0.1)])  # a model of zeros predicts nothing
    assert latency.errors["step"].num == 0


def test_a_start_in_which_tokens_are_free_is_no_shape() -> None:
    latency, true = WorkerLatency(PrefillModel(0.6, 0, 0)), PrefillModel(0.02, 1e-3, 0)
    for number in range(40):
        new = 16 + 37 * number % 180
        latency.observe_prefills([PrefillSample(new, 0, true.seconds(new))])
    for new in (16, 100, 200):
        assert latency.prefill.seconds(new) == pytest.approx(true.seconds(new), rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 5_000), st.integers(0, 5_000), st.floats(1e-3, 10)), min_size=1, max_size=20))
def test_a_refined_model_is_never_negative(rows: list[tuple[int, int, float]]) -> None:
    latency = WorkerLatency(PrefillModel(0.01, 1e-4, 1e-8))
    for row in rows:
        latency.observe_prefills([PrefillSample(*row)])
        assert min(latency.prefill) >= 0
        assert latency.prefill.seconds(1_000) > 0
    assert latency.errors["prefill"].num == len(rows)


@given(st.lists(st.tuples(st.integers(1, 5_000), st.floats(1e-3, 10)), min_size=2, max_size=20), st.data())
def test_measurements_may_come_together_or_apart(rows: list[tuple[int, float]], data: st.DataObject) -> None:
    features = np.array([(1.0, new, new * new / 2) for new, _ in rows])
    seconds = np.array([measured_s for _, measured_s in rows])
    together, apart = (RecursiveFit(prefill_shape(PrefillModel(0.01, 1e-4, 1e-8)), 0.9) for _ in range(2))
    together.add(features, seconds, seconds)
    cut = data.draw(st.integers(1, len(rows) - 1))
    for part in (slice(cut), slice(cut, None)):
        apart.add(features[part], seconds[part], seconds[part])
    for new in (1, 100, 5_000):
        predicted_s = [PrefillModel(*fit.coefficients()).seconds(new) for fit in (together, apart)]
        assert predicted_s[0] == pytest.approx(predicted_s[1], rel=1e-6)
