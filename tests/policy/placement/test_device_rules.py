"""Which prompts workers of a kind of device compute."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.policy.placement.device_rules import DeviceRule
from halfmoon.policy.placement.place import PlacementRules, place
from halfmoon.policy.values import PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView
from tests.policy.placement.test_place import STEP, worker
from tests.policy.reported_state import ReportedState

QUICK, SLOW = PrefillModel(0.01, 1e-4, 0.0), PrefillModel(0.001, 1e-3, 0.0)
GPU = worker("gpu", "prefill", device="cuda NVIDIA H200", prefill_model=QUICK, step_tokens=512)
CPU = worker("cpu", "prefill", device="CPU Xeon", prefill_model=SLOW, step_tokens=512)
DECODE = worker("d0", "decode", step_model=STEP, device="cuda")


def prefill_of(*workers: WorkerView, rules: tuple[str, ...] = (), tokens: int = 100, **more: Any) -> str:
    view = ClusterView([*workers, DECODE])
    chosen = PlacementRules(devices=tuple(map(DeviceRule.parse, rules)))
    request = PlacementRequest(tokens, 20, **more)
    return place(view, request, chosen, ReportedState(view, chosen), 0.0, random.Random(0)).prefill.worker_id


def test_without_a_rule_the_predicted_ttft_decides() -> None:
    assert prefill_of(GPU, CPU, tokens=5) == "cpu"
    assert prefill_of(GPU, CPU, tokens=400) == "gpu"
    busy = replace(GPU, waiting_prefill_tokens=20_000, prefill_free_s=2.0)
    assert prefill_of(busy, CPU, tokens=400) == "cpu"


def test_a_rule_of_length_keeps_longer_prompts_off() -> None:
    busy = replace(GPU, waiting_prefill_tokens=20_000, prefill_free_s=2.0)
    assert prefill_of(busy, CPU, tokens=300, rules=("cpu tokens<=300",)) == "cpu"
    assert prefill_of(busy, CPU, tokens=301, rules=("cpu tokens<=300",)) == "gpu"


def test_a_rule_of_classes_keeps_others_off() -> None:
    rules = ("cpu classes=batch,cheap",)
    assert prefill_of(GPU, CPU, tokens=5, rules=rules, qos_class="cheap") == "cpu"
    assert prefill_of(GPU, CPU, tokens=5, rules=rules, qos_class="gold") == "gpu"


def test_rules_of_several_devices_apply_together() -> None:
    rules = ("cuda classes=gold", "cpu tokens<=50")
    assert prefill_of(GPU, CPU, tokens=400, rules=rules, qos_class="gold") == "gpu"
    assert prefill_of(GPU, CPU, tokens=40, rules=rules, qos_class="chat") == "cpu"


def test_no_rule_leaves_a_prompt_without_a_worker() -> None:
    rules = ("cpu tokens<=10",)
    assert prefill_of(CPU, rules=rules) == "cpu"
    assert prefill_of(replace(GPU, draining=True), CPU, rules=rules) == "cpu"
    assert prefill_of(GPU, CPU, rules=rules, exclude=("gpu",)) == "cpu"


@pytest.mark.parametrize(
    "text", ["cpu", "cpu tokens<=x", "cpu tokens<5", "cpu classes=", "cpu classes=a,,b", "cpu x=1"]
)
def test_what_is_no_rule_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(InvalidRequest, match="tokens<=NUMBER"):
        DeviceRule.parse(text)


def test_a_rule_reads_as_it_is_written() -> None:
    assert DeviceRule.parse("cpu tokens<=512 classes=a,b") == DeviceRule("cpu", 512, ("a", "b"))
