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
        ((replace(P, kv_bytes_per_token=1e9), D), [0, 0], 1, 2),  # less to hand over, over a slow link
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


def test_lower_kv_precision_admits_what_the_hand_over_would_make_late() -> None:
    """A token takes 10 ms of the link, the prompt 4 s, or 2 s at the lower precision, over 99 gaps."""
    view = ClusterView((replace(P, kv_bytes_per_token=1e7), replace(D, step_model=StepModel(0.01, 0.0, 0.0))))
    qos = QosClass("x", tbt_s=0.035, degradation=("lower_kv_precision",))
    request = PlacementRequest(400, 100, least_tokens=100)
    view.put(replace(P, kv_bytes_per_token=1e7, prefill_model=PrefillModel(0.0, 1e-6, 0.0)))
    controller = AdmissionController("predicted", PlacementRules(), random.Random(0))
    admitted = controller.decide(view, request, qos, 0.0)
    assert admitted.lower_kv_precision
    assert admitted.placement.handover_s == pytest.approx(2.0, rel=0.01)
    assert not controller.decide(view, request, replace(qos, tbt_s=0.06), 0.0).lower_kv_precision
    with pytest.raises(Refused, match="token"):
        controller.decide(view, request, replace(qos, degradation=()), 0.0)


def test_steps_add_up_and_those_without_effect_are_left_out() -> None:
    steps = [(one.max_tokens, one.kv_factor) for one in degraded_requests(PlacementRequest(200, 500), QOS)]
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
        assert less.kv_factor <= request.kv_factor
        request = less


def test_an_answer_of_one_token_is_not_judged_by_its_tbt() -> None:
    placement = Placement(P, D, ttft_s=3.0, queue_s=1.0, overhead_s=0.5, work_s=1.0)
    assert Admitted(placement, QOS, 2, False, 2.0).latency(0.1)[:3] == (3.0, 0.1, 1.5)  # half a second in shared steps
    assert Admitted(placement, QOS, 1, False, 1.0).latency(0.1).tbt_s is None
