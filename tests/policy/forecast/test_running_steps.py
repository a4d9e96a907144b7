"""Columns of the steps under way say what looking at each worker says, or less."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.forecast.prefill_step import PromptWork
from halfmoon.policy.forecast.request_forecast import RequestForecast
from halfmoon.policy.placement.place import PlacementRules
from halfmoon.policy.values import PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from tests.policy.admission.test_latency_bounds import NOW_S, D, P, Scene, scenes


def forecast_of(gate: AdmissionController) -> RequestForecast:
    return gate._forecast


@given(scenes, st.integers(1, 250) | st.integers(1, 3_000), st.integers(-1, 1), st.floats(0, 5))
def test_no_prompt_is_computed_before_the_step_under_way_and_its_own_work(
    scene: Scene, num_tokens: int, priority: int, later_s: float
) -> None:
    view = scene.view()
    forecast, now_s = forecast_of(scene.gate(view)), NOW_S + later_s
    left_s = forecast.steps_left_s(view, np.full(view.num_rows, float(num_tokens)), now_s)
    work = PromptWork(num_tokens, 0, priority, -math.inf)
    for row, worker in enumerate(view.workers):
        least_s = left_s[row] + worker.prefill_model.seconds(num_tokens)
        assert least_s <= forecast.earliest_s(view, row, work, now_s) + 1e-6


def test_steps_are_read_again_where_they_changed() -> None:
    view = ClusterView((P, replace(P, worker_id="idle", prefill_free_s=NOW_S + 100), D))
    gate = AdmissionController("predicted", PlacementRules(), random.Random(0))
    forecast, free, one = forecast_of(gate), QosClass("free"), np.ones(3)
    assert forecast.steps_left_s(view, one, NOW_S).tolist() == [0.0, 0.0, 0.0]
    for name, num_tokens in (("first", 100), ("second", 200)):
        request = PlacementRequest(num_tokens, 10)
        gate.inside.enter(name, view, gate.decide(view, request, free, NOW_S), num_tokens, NOW_S)
    first_s, second_s = (P.prefill_model.seconds(num_tokens) for num_tokens in (100, 200))
    assert forecast.steps_left_s(view, one, NOW_S + 0.05).tolist() == pytest.approx([first_s - 0.05, 0.0, 0.0])
    gate.inside.begin_decode("first", NOW_S + 0.1)
    assert forecast.steps_left_s(view, one, NOW_S + 0.1).tolist() == pytest.approx([second_s, 0.0, 0.0])
    gate.leave("second", NOW_S + 0.2, num_output=0, ttft_s=None, tbt_s=None)
    assert forecast.steps_left_s(view, one, NOW_S + 9).tolist() == [0.0, 0.0, 0.0]


def test_a_prompt_that_may_run_in_the_middle_of_a_step_does_not_wait_for_it() -> None:
    view = ClusterView((replace(P, nests_steps=True), D))
    gate = AdmissionController("predicted", PlacementRules(), random.Random(0))
    forecast, request = forecast_of(gate), PlacementRequest(400, 10)
    gate.inside.enter("long", view, gate.decide(view, request, QosClass("free"), NOW_S), 400, NOW_S)
    at_s, step_s = NOW_S + 0.1, P.prefill_model.seconds(400)
    for num_tokens, left_s in ((1, 0.0), (200, 0.0), (201, step_s - 0.1)):
        assert forecast.steps_left_s(view, np.full(2, float(num_tokens)), at_s)[0] == pytest.approx(left_s)
        work, own_s = PromptWork(num_tokens, 0, 0, -math.inf), P.prefill_model.seconds(num_tokens)
        assert forecast.earliest_s(view, 0, work, at_s) == pytest.approx(left_s + own_s)
