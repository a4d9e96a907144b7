"""Observations as gateways send them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.scaling.observation import Observation, ObservedWorker, Traffic, WorkerSpeed
from halfmoon.policy.scaling.observed_json import observation_from, observation_json, of_all_gateways

SPEED = WorkerSpeed(PrefillModel(0.1, 1e-3, 0.0), StepModel(0.01, 1e-3, 1e-6), 64, 1_000)
WORKERS = (ObservedWorker("p0", "prefill"), ObservedWorker("d0", "decode", 2, 7.0, 3.0, 4, 500.0, can_change=False))
SEEN = Observation(WORKERS, Traffic(8.0, 10, 2.5, 6, 5, 4), SPEED, 2.0)


def test_nothing_is_lost_between_two_clocks() -> None:
    sent = json.loads(json.dumps(observation_json(SEEN, 10.0), allow_nan=False))
    assert observation_from(sent, 110.0) == replace(SEEN, workers=(WORKERS[0], replace(WORKERS[1], changed_s=107.0)))


@pytest.mark.parametrize("value", [{}, {"speed": None}, {"speed": {}, "workers": [{"nose": 1}]}])
def test_what_is_no_observation(value: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        observation_from(value, 0.0)


def test_traffic_is_that_of_all_gateways() -> None:
    other = replace(SEEN, traffic=Traffic(4.0, 20, 1.5, 4, 3, 2), ttft_s=1.0)
    together = of_all_gateways(SEEN, [other], 2)
    assert (together.traffic, together.ttft_s) == (Traffic(8.0, 30, 4.0, 10, 8, 6), 1.0)
    assert of_all_gateways(SEEN, [other], 4).traffic == Traffic(8.0, 60, 8.0, 20, 16, 12)
    assert of_all_gateways(SEEN, [], 1) == SEEN
