"""How much neighbours slow a worker down: learned from steps with and without them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.contention import LearnedContention
from halfmoon.policy.models.latency import PrefillModel, PrefillSample, StepModel, StepSample
from halfmoon.policy.models.refinement import WorkerLatency

TRUE = PrefillModel(0.03, 1e-3, 1e-7)


def measure(latency: WorkerLatency, num: int, busy: float, factor: float, slower: float = 1.0, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(num):
        new = rng.randint(20, 512)
        seconds = slower * TRUE.seconds(new) * (1 + factor * busy) * rng.lognormvariate(0, 0.05)
        latency.observe_prefills([PrefillSample(new, 0, seconds)], [busy])


def test_nothing_is_known_at_first_and_one_step_is_not_much() -> None:
    contention = LearnedContention(0.98, 0.9)
    assert contention.factor == 0
    contention.observe([1.7], [1.0])
    assert contention.factor == 0  # it may be the model that is wrong
    contention.observe([1.0], [0.0])
    assert 0 < contention.factor < 0.7


@pytest.mark.parametrize("wrong", [0.25, 0.5, 2.0, 4.0])
@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_a_profile_that_is_wrong_is_no_neighbour(wrong: float, factor: float) -> None:
    """Nine of ten prompts are computed beside somebody, the first ones all."""
    latency, rng = WorkerLatency(PrefillModel(*(wrong * one for one in TRUE))), random.Random(0)
    found = []
    for number in range(60):
        busy = 0.0 if number > 5 and rng.random() < 0.1 else rng.choice([0.5, 1.0, 2.0])
        measure(latency, 1, busy, factor, seed=number)
        found.append(latency.contention)
    assert max(found) < factor + 0.2
    assert latency.contention == pytest.approx(factor, abs=0.1)
    assert latency.prefill.seconds(300) == pytest.approx(TRUE.seconds(300), rel=0.15)


@pytest.mark.parametrize("slower", [0.5, 2.0])
def test_a_speed_that_changes_is_no_neighbour(slower: float) -> None:
    latency, rng = WorkerLatency(TRUE), random.Random(0)
    for number in range(60):
        measure(latency, 1, busy=rng.choice([0.0, 0.5, 1.0]), factor=0.0, seed=number)
    for number in range(40):
        measure(latency, 1, busy=float(number % 10 > 0), factor=0.0, slower=slower, seed=number)
        assert latency.contention < 0.15
    assert latency.prefill.seconds(300) == pytest.approx(slower * TRUE.seconds(300), rel=0.1)


@given(st.floats(0, 3), st.lists(st.floats(0, 2), min_size=40, max_size=60))
def test_the_factor_is_found(factor: float, num_busy: list[float]) -> None:
    contention = LearnedContention(0.98, 0.9)
    told = [0.0, 1.0] * 60 + num_busy
    contention.observe([1 + factor * busy for busy in told], told)
    assert contention.factor == pytest.approx(factor, abs=0.1 * (1 + factor))


def test_a_model_beside_busy_neighbours_is_that_of_a_worker_alone() -> None:
    latency = WorkerLatency(TRUE)
    for turn in range(6):
        measure(latency, 10, busy=float(turn % 2), factor=0.8, seed=turn)
    assert latency.contention == pytest.approx(0.8, abs=0.15)
    assert latency.prefill.seconds(300) == pytest.approx(TRUE.seconds(300), rel=0.1)


def test_who_was_always_beside_others_is_predicted_beside_others() -> None:
    latency = WorkerLatency(TRUE)
    measure(latency, 60, busy=1.0, factor=0.8)
    beside_s = latency.prefill.seconds(300) * (1 + latency.contention)
    assert beside_s == pytest.approx(1.8 * TRUE.seconds(300), rel=0.1)


def test_decode_steps_beside_busy_neighbours_tell_of_the_worker_alone() -> None:
    latency, true = WorkerLatency(), StepModel(0.02, 2e-3, 2e-6)
    for turn in range(40):
        steps = [StepSample(batch, 100 * batch, true.seconds(batch, 100 * batch)) for batch in (1, 2, 4, 8)]
        busy = float(turn % 2)
        latency.observe_steps([one._replace(seconds=one.seconds * (1 + 0.6 * busy)) for one in steps], [busy] * 4)
    assert latency.step_contention == pytest.approx(0.6, abs=0.1)
    assert latency.step.seconds(4, 400) == pytest.approx(true.seconds(4, 400), rel=0.1)
    assert latency.contention == 0  # prefills are another matter


def test_a_slower_machine_is_no_neighbour() -> None:
    latency = WorkerLatency(TRUE)
    for turn in range(6):
        measure(latency, 10, busy=float(turn % 2), factor=0.8, seed=turn)
    for turn in range(6):
        measure(latency, 10, busy=float(turn % 2), factor=0.8, slower=2, seed=turn)
    assert latency.contention == pytest.approx(0.8, abs=0.2)
    assert latency.prefill.seconds(300) == pytest.approx(2 * TRUE.seconds(300), rel=0.1)


def test_a_pause_is_no_contention() -> None:
    contention = LearnedContention(0.98, 0.9)
    contention.observe([1.0, 1.5] * 50, [0.0, 1.0] * 50)
    before = contention.factor
    contention.observe([1000.0], [1.0])
    assert contention.factor == pytest.approx(before, abs=0.05)


def test_predictions_follow_a_machine_that_lost_a_core_within_thirty_steps() -> None:
    latency = WorkerLatency(TRUE)
    measure(latency, 100, busy=0.0, factor=0.0)
    measure(latency, 30, busy=0.0, factor=0.0, slower=2)
    assert latency.prefill.seconds(300) == pytest.approx(2 * TRUE.seconds(300), rel=0.2)
    measure(latency, 40, busy=0.0, factor=0.0)
    assert latency.prefill.seconds(300) == pytest.approx(TRUE.seconds(300), rel=0.2)
