"""Columns of the steps under way say what looking at each worker says, or less."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.forecast.prefill_queue_model import PromptWork
from halfmoon.policy.forecast.request_forecast import RequestForecast
from halfmoon.policy.placement.place import PlacementRules
from halfmoon.policy.values import PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from tests.policy.admission.test_latency_bounds import NOW_S, D, P, Scene, scenes


def forecast_of(gate: AdmissionController) -> RequestForecast:
    return gate._forecast


@given(scenes, st.integers(1, 3_000), st.integers(-1, 1), st.floats(0, 5))
def test_no_prompt_is_computed_before_the_step_under_way_and_its_own_work(
    scene: Scene, num_tokens: int, priority: int, later_s: float
) -> None:
    view = scene.view()
    forecast, now_s = forecast_of(scene.gate(view)), NOW_S + later_s
    left_s = forecast.steps_left_s(view, now_s)
    work = PromptWork(num_tokens, 0, priority, -math.inf)
    for row, worker in enumerate(view.workers):
        least_s = left_s[row] + worker.prefill_model.seconds(num_tokens)
        assert least_s <= forecast.earliest_s(view, row, work, now_s) + 1e-6


def test_steps_are_read_again_where_they_changed() -> None:
    view = ClusterView((P, replace(P, worker_id="idle", prefill_free_s=NOW_S + 100), D))
    gate = AdmissionController("predicted", PlacementRules(), random.Random(0))
    forecast, free = forecast_of(gate), QosClass("free")
    assert forecast.steps_left_s(view, NOW_S).tolist() == [0.0, 0.0, 0.0]
    for name, num_tokens in (("first", 100), ("second", 200)):
        request = PlacementRequest(num_tokens, 10)
        gate.inside.enter(name, view, gate.decide(view, request, free, NOW_S), num_tokens, NOW_S)
    first_s, second_s = (P.prefill_model.seconds(one) for one in (100, 200))
    assert forecast.steps_left_s(view, NOW_S + 0.05).tolist() == pytest.approx([first_s - 0.05, 0.0, 0.0])
    gate.inside.begin_decode("first", NOW_S + 0.1)
    assert forecast.steps_left_s(view, NOW_S + 0.1).tolist() == pytest.approx([second_s, 0.0, 0.0])
    gate.leave("second", NOW_S + 0.2, num_output=0, ttft_s=None, tbt_s=None)
    assert forecast.steps_left_s(view, NOW_S + 9).tolist() == [0.0, 0.0, 0.0]
