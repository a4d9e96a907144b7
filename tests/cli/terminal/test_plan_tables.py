"""What `halfmoon plan` says of colocated and separate workers beside each other."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from halfmoon.cli.terminal.plan_tables import print_plan

QUANTILES = {"p50": 0.1, "p90": 0.2, "p99": 0.3}
TOGETHER = {
    "layout": "2 both TP1",
    "same_as": [],
    "num_gpus": 2,
    "price_per_hour": 6.0,
    "goodput_per_s": 10.0,
    "goodput_per_s_per_gpu": 5.0,
    "goodput_per_dollar": 6000.0,
}
APART = TOGETHER | {"layout": "2 prefill TP1 + 1 decode TP1", "num_gpus": 3, "price_per_hour": 9.0}
FATE = {
    "rate_per_s": 9.0,
    "keeps_up": True,
    "attainment_joint": 0.9,
    "attainment_ttft": 0.9,
    "attainment_tpot": 1.0,
    "ttft_s": QUANTILES,
    "tpot_s": QUANTILES,
}


@pytest.mark.parametrize(
    ("best", "disaggregated", "colocated", "says"),
    [
        (TOGETHER, APART, TOGETHER, "2 prefill TP1 + 1 decode TP1 (3 GPUs, 9.00 $/h"),
        (TOGETHER, None, TOGETHER, "of layouts with separate prefill and decode workers: none meets the targets"),
        (
            APART,
            APART,
            TOGETHER,
            "1.50 times the goodput for each GPU of the best colocated layout, 2 both TP1 (2 GPUs",
        ),
        (APART, APART, None, "no colocated layout meets the targets"),
    ],
)
def test_the_other_kind_of_layout_is_named(best: Any, disaggregated: Any, colocated: Any, says: str) -> None:
    summary = {
        "targets": {"tbt_s": None},
        "criterion": "joint",
        "layouts": [best | FATE],
        "disaggregated": disaggregated,
        "colocated": colocated,
        "over_colocated": 1.5,
        "sensitivity": {},
        "latency": [],
        "notes": [],
    }
    text = StringIO()
    print_plan(summary, Console(file=text, width=200))
    assert says in text.getvalue()


def test_what_the_tbt_target_is_held_against_is_named() -> None:
    fate = FATE | {"attainment_tbt": 0.9, "tbt_s": QUANTILES}
    summary = {
        "targets": {"tbt_s": 0.05, "tbt_of": "longest-tenth"},
        "criterion": "joint",
        "layouts": [TOGETHER | fate],
        "disaggregated": None,
        "colocated": TOGETHER,
        "over_colocated": 1.0,
        "sensitivity": {},
        "latency": [],
        "notes": [],
    }
    text = StringIO()
    print_plan(summary, Console(file=text, width=200))
    assert "joint criterion; TBT of the longest tenth; times" in text.getvalue()
