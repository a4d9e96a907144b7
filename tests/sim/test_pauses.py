"""Pauses in a simulated cluster: by hand, in both kinds of hand-over, and for all that comes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Handover
from halfmoon.sim.result import SimResult
from halfmoon.sim.simulation import simulate
from tests.sim.small_clusters import FAST, group, pair, work

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
