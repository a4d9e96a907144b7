"""A hand-over costs what the decode worker lacks, over its link, behind what is on its way there already."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.forecast.handover import HandoverPrediction, HandoverQueue, predict_handover
from halfmoon.policy.values import MostSeen, Placement, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView
from tests.policy.view.test_link_speeds import Link

P = WorkerView("p", "prefill", "p:1", 9_000, 10, 900, 900, kv_bytes_per_token=1_000.0, holder=0)


def predicted(
    held_blocks: Sequence[int],
    ahead: float = 0.0,
    ttft_s: float = 0.0,
    queue_s: float = 0.0,
    most_seen: float = math.inf,
) -> HandoverPrediction:
    """Of 105 tokens to three decode workers, on links of 1, 10 and 10 (unmeasured) MB/s."""
    view = ClusterView(
        (P, *(WorkerView(f"d{n}", "decode", f"d{n}:1", 9_000, 10, 900, 900, holder=1 + n) for n in range(3)))
    )
    view.links.report(0, [Link("d0:1", 1e6, 0.5), Link("d1:1", 10e6)])
    cached = np.array([99, *held_blocks, 0], dtype=np.int64)
    request = PlacementRequest(105, 10, most_seen=MostSeen(answer=most_seen), cached_blocks=cached)
    return predict_handover(view, request, Placement(P, P, ttft_s, queue_s=queue_s), np.full(4, ahead))


def test_only_whole_blocks_that_are_missing_are_sent() -> None:
    handover = predicted((0, 3, 99))
    assert handover.held_tokens[1:].tolist() == [0, 30, 100]
    assert handover.num_bytes[1:].tolist() == [105e3, 75e3, 5e3]
    assert handover.exposed_s[1:3].tolist() == pytest.approx([0.605, 0.0075])


def test_what_leaves_while_the_prompt_is_computed_costs_nothing() -> None:
    assert predicted((0, 0, 0), ttft_s=0.1).exposed_s[1:3].tolist() == pytest.approx([0.505, 0.0])
    assert predicted((0, 0, 0), ttft_s=0.1, queue_s=0.1).exposed_s[1:3].tolist() == pytest.approx([0.605, 0.0105])


def test_what_a_kv_policy_does_not_keep_is_not_sent() -> None:
    handover = predicted((0, 3, 99), most_seen=45)
    assert handover.num_bytes[1:].tolist() == [45e3, 15e3, 0]


def test_it_waits_behind_what_is_on_its_way() -> None:
    assert predicted((0, 0, 0), ahead=1e6).exposed_s[1:3].tolist() == pytest.approx([1.605, 0.1105])
    assert predicted((0, 0, 0), ahead=1e6, ttft_s=0.2, queue_s=0.19).exposed_s[2] == pytest.approx(0.0005)


STEPS = st.tuples(st.integers(0, 200), st.integers(0, 90), st.integers(0, 5), st.integers(0, 9), st.booleans())


@given(st.lists(STEPS, max_size=300))
def test_the_queue_is_the_sum_of_those_in_it_that_end_before(steps: list[tuple[int, int, int, int, bool]]) -> None:
    queue, there = HandoverQueue(), dict[int, tuple[int, int, int]]()
    for name, row, num_bytes, at_s, joins in steps:
        if joins:
            queue.join(str(name), row, float(num_bytes), float(at_s))
            there[name] = row, num_bytes, at_s
        else:
            queue.leave(str(name))
            there.pop(name, None)
    for until_s in (-1, 4, 9):
        expected = np.zeros(100)
        for row, num_bytes, at_s in there.values():
            expected[row] += num_bytes if at_s <= until_s else 0
        assert queue.ahead_bytes(100, until_s).tolist() == expected.tolist()
