"""The steps by which a class reduces a request, and when a step is placed anew."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.degradation import PRECISION_FACTOR, Admitted, degraded_requests
from halfmoon.policy.admission.qos_classes import Degradation, QosClass
from halfmoon.policy.admission.refusal import Refused
from halfmoon.policy.forecast.request_forecast import RequestForecast
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.placement.place import PlacementRules
from halfmoon.policy.values import Placement, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView

P = WorkerView("p", "prefill", "a:1", 9000, 10, 900, 900, step_tokens=100, prefill_model=PrefillModel(0.0, 0.01, 0.0))
D = WorkerView("d", "decode", "b:1", 9000, 10, 900, 900, step_model=StepModel(0.0, 0.01, 0.0))


QOS = QosClass("x", ttft_s=0.01, capped_tokens=100, degradation=("cap_max_tokens", "lower_kv_precision"))


@pytest.mark.parametrize(
    ("workers", "num_blocks", "num_estimates", "num_placed"),
    [
        ((P, D), [0, 0], 1, 1),
        ((P, D, replace(D, worker_id="small", total_blocks=30)), [0, 0], 1, 2),  # it may serve a short answer
        ((replace(P, holder=0, fetch_s_per_token=1e-3), D), [0, 9, 0], 2, 2),  # fetching may be faster
    ],
)
def test_a_step_is_placed_anew_only_if_another_worker_may_serve_it_better(
    monkeypatch: pytest.MonkeyPatch,
    workers: tuple[WorkerView, ...],
    num_blocks: list[int],
    num_estimates: int,
    num_placed: int,
) -> None:
    counts = Counter[str]()

    def counted(name: str) -> Callable[..., Any]:
        method = getattr(RequestForecast, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return method(*args)

        return call

    for name in ("ttft", "refine_decode"):
        monkeypatch.setattr(RequestForecast, name, counted(name))
    controller = AdmissionController("predicted", PlacementRules(), random.Random(0))
    request = PlacementRequest(200, 500, cached_blocks=np.array(num_blocks))
    with pytest.raises(Refused, match="first token"):
        controller.decide(ClusterView(workers), request, QOS, 0.0)
    assert (counts["ttft"], counts["refine_decode"]) == (num_estimates, num_placed)


def test_steps_add_up_and_those_without_effect_are_left_out() -> None:
    steps = [(one.max_tokens, one.fetch_factor) for one in degraded_requests(PlacementRequest(200, 500), QOS)]
    assert steps == [(100, 1.0), (100, PRECISION_FACTOR)]
    assert [one.max_tokens for one in degraded_requests(PlacementRequest(200, 50), QOS)] == [50]
    assert list(degraded_requests(PlacementRequest(200, 50), replace(QOS, degradation=("cap_max_tokens",)))) == []
    assert list(degraded_requests(PlacementRequest(200, 500), replace(QOS, degradation=("shed_lowest_class",)))) == []


@given(
    st.integers(1, 10_000),
    st.integers(1, 500),
    st.lists(st.sampled_from(get_args(Degradation)), unique=True).map(tuple),
)
def test_no_step_asks_for_more(max_tokens: int, capped: int, degradation: tuple[Degradation, ...]) -> None:
    request, qos = PlacementRequest(200, max_tokens), QosClass("x", capped_tokens=capped, degradation=degradation)
    for less in degraded_requests(request, qos):
        assert less != request
        assert less.max_tokens <= request.max_tokens
        assert less.fetch_factor <= request.fetch_factor
        request = less


def test_an_answer_of_one_token_is_not_judged_by_its_tbt() -> None:
    placement = Placement(P, D, ttft_s=3.0, queue_s=1.0, overhead_s=0.5, work_s=1.0)
    assert Admitted(placement, QOS, 2, False, 2.0).latency(0.1)[:3] == (3.0, 0.1, 1.5)  # half a second in shared steps
    assert Admitted(placement, QOS, 1, False, 1.0).latency(0.1).tbt_s is None
