"""What a request may have: all that it asks for, then less, predicted anew only where that may help."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from halfmoon.policy.admission.classes import Degradation, QosClass
from halfmoon.policy.admission.degradation import DegradationSteps
from halfmoon.policy.forecast.request_forecast import RequestForecast
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.models.output_lengths import OutputLengths
from halfmoon.policy.placement.place import NOTHING_CACHED, Placement, PlacementRequest, PlacementRules
from halfmoon.policy.placement.ttft import TtftPrediction
from halfmoon.policy.view.cluster_view import ClusterView, WorkerView

P = WorkerView("p", "prefill", "a:1", 9000, 10, 900, 900, step_tokens=100, prefill_model=PrefillModel(0.0, 0.01, 0.0))
D = WorkerView("d", "decode", "b:1", 9000, 10, 900, 900, step_model=StepModel(0.0, 0.01, 0.0))


class Counting(RequestForecast):
    """Knows how often somebody asked."""

    def __init__(self) -> None:
        super().__init__(PlacementRules(), random.Random(0))
        self.num_placed = 0

    def place(
        self,
        view: ClusterView,
        request: PlacementRequest,
        now_s: float,
        depths: NDArray[np.int64] = NOTHING_CACHED,
        ranked_by: TtftPrediction | None = None,
    ) -> Placement:
        self.num_placed += 1
        return super().place(view, request, now_s, depths, ranked_by)


@pytest.mark.parametrize(
    ("workers", "depths", "num_placed"),
    [
        ((P, D), [0, 0], 1),
        ((P, D, replace(D, worker_id="small", total_blocks=30)), [0, 0], 2),  # that one may serve a short answer
        ((replace(P, holder=0, fetch_s_per_token=1e-3), D), [0, 9, 0], 2),  # fetching may be quicker
    ],
)
def test_less_is_predicted_anew_only_where_another_worker_may_serve_it(
    workers: tuple[WorkerView, ...], depths: list[int], num_placed: int
) -> None:
    view, forecast = ClusterView(workers), Counting()
    steps: tuple[Degradation, ...] = ("cap_max_tokens", "lower_kv_precision", "shed_lowest_class")
    qos = QosClass("x", ttft_s=0.01, capped_tokens=100, degradation=steps)
    offers = DegradationSteps(forecast, OutputLengths()).of(
        view, PlacementRequest(200, 500), qos, 0.0, np.array(depths)
    )
    found = [(one.max_tokens, one.lower_kv_precision) for one in offers]
    assert found == [(500, False), (100, False), (100, True)]
    assert forecast.num_placed == num_placed


def test_what_is_not_taken_is_not_predicted() -> None:
    forecast = Counting()
    qos = QosClass("x", capped_tokens=100, degradation=("cap_max_tokens",))
    offers = DegradationSteps(forecast, OutputLengths()).of(
        ClusterView((P, D)), PlacementRequest(200, 50), qos, 0.0, NOTHING_CACHED
    )
    assert next(offers).max_tokens == 50
    assert list(offers) == []  # it asks for less than the cap already
    assert forecast.num_placed == 1
