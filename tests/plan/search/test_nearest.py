"""What is near to a problem that nothing answers is answered when it is asked for."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from halfmoon.plan.planning import make_plan, problem_from
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.search.feasible import NoLayout
from halfmoon.plan.search.search import search

BASE = PlanRequest(
    "opt-13b",
    "a100-80g",
    "in=512,out=64",
    ttft_s=0.2,
    tpot_s=0.1,
    gpus_per_node=2,
    num_requests=60,
    latency="distserve:opt-13b",
)


def refusal(request: PlanRequest) -> str:
    with pytest.raises(NoLayout) as caught, ThreadPoolExecutor(1) as pool:
        search(problem_from(request)[0], pool)
    return caught.value.message


def test_the_rate_that_is_named_is_held() -> None:
    request = replace(BASE, rate_per_s=500.0)
    found = re.search(r"nearest feasible is ([\d.]+) requests/s", refusal(request))
    assert found is not None
    plan = make_plan(replace(request, rate_per_s=float(found[1])), 1)
    assert plan.plan.best[0].layout.num_gpus <= 2


@pytest.mark.parametrize(("ttft_s", "tpot_s"), [(0.001, 0.1), (0.2, 0.001), (0.001, 0.001)])
def test_the_targets_that_are_named_are_met_at_the_rate(ttft_s: float, tpot_s: float) -> None:
    request = replace(BASE, ttft_s=ttft_s, tpot_s=tpot_s, rate_per_s=4.0)
    found = re.search(r"nearest feasible at 4 requests/s: TTFT ([\d.]+) s and TPOT ([\d.]+) s", refusal(request))
    assert found is not None
    nearest = replace(request, ttft_s=float(found[1]), tpot_s=float(found[2]))
    assert (nearest.ttft_s == ttft_s) == (ttft_s == 0.2)  # what idle workers meet stays as it was
    assert make_plan(nearest, 1).plan.best[0].evaluation.attainment.joint >= 0.9


def test_a_rate_that_is_far_too_high_has_no_nearest_targets() -> None:
    assert "with fifty times that" in refusal(replace(BASE, ttft_s=0.001, rate_per_s=1e5))
