"""Reserved requests: others are judged with them, and a released one leaves no trace."""

from __future__ import annotations

import random

import pytest

from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.qos_classes import ClassTable, QosClass
from halfmoon.policy.admission.refusal import AdmissionMode, Refused
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.placement.place import PlacementRules
from halfmoon.policy.values import PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView

P = WorkerView("p", "prefill", "p:1", 1_000, 10, 100, 100, prefill_model=PrefillModel(0.1, 0.001, 0.0))
D = WorkerView("d", "decode", "d:1", 1_000, 10, 100, 100, step_model=StepModel(0.01, 0.01, 0.0))
TWO = QosClass("two", tbt_s=0.035)  # three would take 40 ms
ASKED = PlacementRequest(50, 20)


def gate_of(mode: AdmissionMode = "predicted") -> tuple[AdmissionController, ClusterView]:
    gate = AdmissionController(mode, PlacementRules(), random.Random(0))
    gate.classes = ClassTable((TWO,))
    return gate, ClusterView((P, D))


def hold(gate: AdmissionController, view: ClusterView, name: str, now_s: float = 0.0) -> None:
    gate.inside.reserve(name, view, gate.decide(view, ASKED, TWO, now_s), ASKED.num_prompt_tokens, now_s)


@pytest.mark.parametrize("mode", ["load", "predicted"])
def test_others_are_judged_beside_those_that_are_held(mode: AdmissionMode) -> None:
    gate, view = gate_of(mode)
    alone = gate.decide(view, ASKED, TWO, 0.0)
    hold(gate, view, "a")
    hold(gate, view, "b")
    with pytest.raises(Refused, match="40 ms") as caught:
        gate.decide(view, ASKED, TWO, 0.0)
    assert (caught.value.retry_after_ms, caught.value.is_by_others) == (60_000, False)  # who is held leaves after it
    for name in ("a", "b"):
        gate.inside.release(name, 0.0)
    assert gate.decide(view, ASKED, TWO, 0.0) == alone


def test_who_is_called_up_is_not_beside_itself_and_counts_once() -> None:
    gate, view = gate_of()
    hold(gate, view, "a")
    gate.inside.activate("a", 1.0)
    admitted = gate.decide(view, ASKED, TWO, 1.0)
    assert admitted.placement.tbt_s == pytest.approx(0.02)
    gate.inside.enter("a", view, admitted, ASKED.num_prompt_tokens, 1.0)
    hold(gate, view, "b", 1.0)
    with pytest.raises(Refused) as caught:
        gate.decide(view, ASKED, TWO, 1.0)
    assert caught.value.is_by_others
    gate.leave("a", 2.0, num_output=20, ttft_s=0.1, tbt_s=0.02)
    gate.inside.release("b", 2.0)
    assert gate.decide(view, ASKED, TWO, 2.0).placement.tbt_s == pytest.approx(0.02)


def test_an_idle_cluster_stays_idle_for_who_was_only_held() -> None:
    gate, view = gate_of()
    assert not gate.is_probe(0.0)
    hold(gate, view, "a", 5.0)
    assert not gate.is_probe(11.0)
    gate.inside.release("a", 11.0)
    assert gate.is_probe(11.0)
    gate.inside.enter("b", view, gate.decide(view, ASKED, TWO, 11.0), ASKED.num_prompt_tokens, 11.0)
    gate.leave("b", 12.0, num_output=1, ttft_s=None, tbt_s=None)
    assert not gate.is_probe(12.0)
