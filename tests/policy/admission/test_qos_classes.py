"""QoS classes: which requests belong to them, and what no class can be."""

from __future__ import annotations

import math
from typing import Any

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.policy.admission.qos_classes import Caller, ClassTable, MatchRule, QosClass

GOLD = QosClass(
    "gold", -1, 0.5, rules=(MatchRule("header", "gold", "X-Customer-Tier"), MatchRule("api_key", "key-1")), ttft_s=1.0
)
BULK = QosClass("bulk", 5, rules=(MatchRule("model", "cheap"),))


def test_the_first_rule_that_holds_by_priority() -> None:
    table = ClassTable((BULK, GOLD))
    assert table.of(Caller({"x-customer-tier": "gold"}, model="cheap")) is GOLD
    assert table.of(Caller({}, api_key="key-1")) is GOLD
    assert table.of(Caller({"x-customer-tier": "silver"}, model="cheap")) is BULK
    assert table.of(Caller({})).name == "default"
    mine = QosClass("default", ttft_s=2.0)
    assert ClassTable((mine,)).of(Caller({})) is mine


def test_batches_come_after_all_classes_and_make_none_miss_its_targets() -> None:
    lowest = ClassTable((BULK, GOLD, QosClass("last", 1_000, tbt_s=0.1))).of_batches
    assert (lowest.name, lowest.priority, lowest.ttft_s, lowest.tbt_s) == ("batch", 1_001, 1.0, 0.1)
    assert lowest.tbt_target_s == math.inf  # nobody waits for their tokens, so prompts beside them are whole
    assert QosClass("last", tbt_s=0.1).tbt_target_s == 0.1
    assert ClassTable((BULK,)).of_batches.tbt_s is None
    own = QosClass("batch", 3)
    assert ClassTable((BULK, own)).of_batches is own
    assert ClassTable((BULK,)).named("bulk") is BULK
    assert ClassTable((BULK,)).named("gone").name == "default"


@pytest.mark.parametrize(
    ("param", "changed"),
    [
        ("name", {"name": ""}),
        ("reserved", {"reserved": 1.5}),
        ("attainment", {"attainment": 0.0}),
        ("ttft_s", {"ttft_s": 0.0}),
        ("tbt_s", {"tbt_s": -1.0}),
        ("capped_tokens", {"capped_tokens": 0}),
        ("max_pause_s", {"max_pause_s": -1.0}),
        ("degradation", {"degradation": ("cap_max_tokens", "cap_max_tokens")}),
        ("rules", {"rules": (MatchRule("header", "gold"),)}),
        ("rules", {"rules": (MatchRule("api_key", ""),)}),
        ("reserved", {"reserved": float("nan")}),
    ],
)
def test_what_no_class_can_be(param: str, changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        QosClass(**{"name": "x", **changed})
    assert caught.value.param == param


def test_what_no_table_can_be() -> None:
    for classes in ((GOLD, GOLD), (GOLD, QosClass("other", reserved=0.6))):
        with pytest.raises(InvalidRequest):
            ClassTable(classes)


def test_shares_that_are_everything_are_not_more_than_that() -> None:
    ClassTable(QosClass(str(number), reserved=share) for number, share in enumerate((0.1, 0.1, 0.1, 0.7)))
    ClassTable(QosClass(str(number), reserved=1 / 49) for number in range(49))
