"""Pauses in a simulated cluster: by hand, in both kinds of hand-over, and for all that comes."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.forecast.request_forecast import RequestForecast, RunningRequest
from halfmoon.policy.placement.place import PlacementRules, place
from halfmoon.policy.values import Placement, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Handover
from halfmoon.sim.result import SimResult
from halfmoon.sim.simulation import simulate
from tests.sim.small_clusters import FAST, MODEL, group, pair, work

ONE = BatchLimits(max_running=1)


def run(spec: ClusterSpec, max_pause_s: float, *rows: tuple[float, int, int, int]) -> SimResult:
    classes = QosClass("high"), QosClass("low", priority=1, max_pause_s=max_pause_s)
    workload = work(*(row[:3] for row in rows))
    numbers = np.array([row[3] for row in rows])
    return simulate(replace(spec, classes=classes), replace(workload, classes=numbers))


def test_a_prompt_takes_the_place_of_a_lower_class_by_hand() -> None:
    """The low one has its first token at 100 ms, then one every 11 ms: ten when the high one comes at 215 ms. That
    one's 50 tokens and four steps take 94 ms from the end of the running step on."""
    spec = ClusterSpec((group("both", limits=ONE),), FAST)
    rows = (0.0, 100, 31, 1), (0.215, 50, 5, 0)
    found = run(spec, 60.0, *rows)
    begins_s = 0.1 + 11 * 0.011
    assert found.end_s == pytest.approx([0.1 + 30 * 0.011 + 0.094, begins_s + 0.094])
    assert found.longest_gap_s[0] == pytest.approx(0.094 + 0.011)
    assert found.workers.num_paused.tolist() == [1]
    waiting = run(spec, 0.0, *rows)
    assert waiting.end_s == pytest.approx([0.43, 0.43 + 0.094])


def test_an_answer_that_has_risen_takes_its_place_back_by_hand() -> None:
    """Three high ones would keep the low one waiting; after 50 ms it goes on when the first of them ends."""
    spec = ClusterSpec((group("both", limits=ONE),), FAST)
    found = run(spec, 0.05, (0.0, 100, 31, 1), *((0.215, 50, 5, 0) for _ in range(3)))
    first_s = 0.1 + 11 * 0.011 + 0.094
    rises_s = first_s - (0.1 + 11 * 0.011)  # of it: so long it then goes before all, if it does not end before
    assert found.end_s[1] == pytest.approx(first_s)
    steps = int(np.ceil(rises_s / 0.011))
    assert found.longest_gap_s[0] == pytest.approx(0.094 + 0.011)
    assert found.end_s[2] == pytest.approx(first_s + steps * 0.011 + 0.094)


@pytest.mark.parametrize("handover", ["push", "pull"])
def test_a_hand_over_takes_the_place_of_a_lower_class(handover: Handover) -> None:
    decode = group("decode", limits=ONE)
    spec = replace(pair(replace(FAST, handover=handover), conditional="off"), groups=(group("prefill"), decode))
    rows = (0.0, 100, 101, 1), (0.3, 50, 5, 0)
    found, waiting = run(spec, 60.0, *rows), run(spec, 0.0, *rows)
    assert found.is_completed.all()
    assert found.workers.num_paused.tolist() == [0, 1]
    assert found.end_s[1] < 0.45 < waiting.end_s[1]


@settings(max_examples=100)
@given(
    rows=st.lists(
        st.tuples(st.floats(0.0, 3.0), st.integers(1, 300), st.integers(1, 200), st.integers(0, 1)),
        min_size=1,
        max_size=20,
    ),
    num_blocks=st.integers(9, 30),
    max_running=st.integers(1, 5),
    max_pause_s=st.sampled_from([0.0, 0.2, 1.0, 1e6]),
    kind=st.sampled_from(["both", "push", "pull"]),
)
def test_every_request_ends(
    rows: list[tuple[float, int, int, int]], num_blocks: int, max_running: int, max_pause_s: float, kind: str
) -> None:
    small = group("both", limits=BatchLimits(256, 64, max_running), kv_tokens=64 * num_blocks)
    if kind == "both":
        spec = ClusterSpec((small,), FAST)
    else:
        network = replace(FAST, handover=kind)  # type: ignore[arg-type]
        spec = ClusterSpec((group("prefill"), replace(small, role="decode")), network)
    found = run(spec, max_pause_s, *sorted(rows))
    refused = found.outcome == 1
    assert (found.is_completed | refused).all()
    assert kind == "push" or not refused.any()


def forecast_of(max_running: int, max_pause_s: float, *rows: tuple[float, int, int, int]) -> list[tuple[float, float]]:
    """When each request gets its first and its last token, as predicted when the last of them comes.

    One worker of both roles, whose requests have begun to decode when the next one comes.
    """
    worker = WorkerView(
        "w", "both", "h:1", 9000, 64, 200, 200, step_tokens=8192, chunk_tokens=512, max_running=max_running,
        prefill_model=MODEL.policy_prefill, step_model=MODEL.policy_step,
    )  # fmt: skip
    view, forecast, first_s = ClusterView((worker,)), RequestForecast(None), []
    step_s = MODEL.policy_step.seconds(len(rows) - 1, 0)
    for number, (now_s, num_prompt, num_output, priority) in enumerate(rows):
        pause_s = max_pause_s if priority else 0.0
        request = PlacementRequest(
            num_prompt, num_output, priority=priority, class_priority=priority, max_pause_s=pause_s,
            num_output=num_output,
        )  # fmt: skip
        placement: Placement = place(view, request, PlacementRules(), forecast, now_s, random.Random(0))
        running = RunningRequest(
            num_prompt, num_output - 1, step_s, priority, class_priority=priority, max_pause_s=pause_s
        )
        forecast.move(str(number), view, running, placement, now_s)
        first_s.append(now_s + placement.ttft_s)
        if number + 1 < len(rows):
            forecast.begin_decode(str(number), first_s[-1])
    now_s = rows[-1][0]
    ends_s = [
        float(forecast.decodes.next_ends(0, now_s, [str(other) for other in range(len(rows)) if other != number])[0])
        for number in range(len(rows))
    ]
    return list(zip(first_s, ends_s, strict=True))


STEP_S = 0.02  # the longest in what follows: a prediction may be wrong by one


@pytest.mark.parametrize("num_low", [1, 2, 3])
@pytest.mark.parametrize("num_output", [5, 20, 60])
def test_the_forecast_knows_pauses_as_the_simulator_does(num_low: int, num_output: int) -> None:
    """Of low answers that fill a worker the last one is paused while a high one is there."""
    lows = [(0.2 * number, 100, 90, 1) for number in range(num_low)]
    rows = *lows, (0.8, 50, num_output, 0)
    spec = ClusterSpec((group("both", limits=BatchLimits(max_running=num_low)),), FAST)
    found = run(spec, 60.0, *rows)
    assert found.workers.num_paused.tolist() == [1]
    predicted = forecast_of(num_low, 60.0, *rows)
    high_first_s, high_end_s = predicted[-1]
    assert high_first_s == pytest.approx(found.start_s[-1] + found.ttft_s[-1], abs=2 * STEP_S)
    assert high_end_s == pytest.approx(found.end_s[-1], abs=0.1 * num_output * STEP_S + 3 * STEP_S)
    paused = num_low - 1
    ends_s = [end_s for _, end_s in predicted[:-1]]
    unpaused_s = [end_s for _, end_s in forecast_of(num_low + 1, 60.0, *rows)[:-1]]
    delay_s = (
        found.end_s[paused]
        - run(ClusterSpec((group("both", limits=BatchLimits(max_running=num_low + 1)),), FAST), 60.0, *rows).end_s[
            paused
        ]
    )
    assert ends_s[:paused] == pytest.approx(unpaused_s[:paused], abs=2 * STEP_S)
    assert ends_s[paused] - unpaused_s[paused] == pytest.approx(delay_s, abs=0.25 * delay_s + 3 * STEP_S)


def test_the_forecast_knows_how_long_a_low_one_waits_as_the_simulator_does() -> None:
    """It pauses nobody: its first token comes when one of two high answers has ended."""
    rows = (0.0, 10, 60, 0), (0.05, 10, 90, 0), (0.2, 10, 20, 1)
    spec = ClusterSpec((group("both", limits=BatchLimits(max_running=2)),), FAST)
    found = run(spec, 60.0, *rows)
    predicted = forecast_of(2, 60.0, *rows)
    assert found.ttft_s[2] > 0.4  # or this would show nothing
    assert predicted[2][0] == pytest.approx(found.start_s[2] + found.ttft_s[2], abs=4 * STEP_S)
