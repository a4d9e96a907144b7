"""When a prefix is copied to the store near which it is asked for, or to one more worker."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from halfmoon.policy.models.latency import PrefillModel
from halfmoon.policy.placement.replication import MIN_USES_OF_WORKERS, NextHolder, Replication, next_holder
from halfmoon.policy.values import Placement, PlacementRequest, TtftPrediction
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView

RATE = 100.0  # bytes per second: 1,000 at once
PROMPT = PlacementRequest(400, 10, cached_blocks=np.array([5, 5, 2, 6, 0]))  # and 0 of whoever has no number


def test_the_second_use_near_a_store_makes_a_copy_and_the_next_ones_do_not() -> None:
    rule = Replication(RATE)
    assert [rule.is_hot(1.0), rule.is_hot(2.0), rule.is_hot(2.0, MIN_USES_OF_WORKERS)] == [False, True, False]
    assert rule.decide("a:1", 7, 0, 0.0) == "here"
    assert rule.decide("a:1", 7, 500, 0.0) == "copy"
    assert rule.decide("a:1", 7, 500, 1.0) == "asked"
    assert rule.decide("b:1", 7, 500, 1.0) == "copy"
    assert rule.decide("a:1", 7, 500, 61.0) == "copy", "it was refused, or is gone again"


def test_the_rate_of_copies_is_bounded() -> None:
    rule, copied, now_s = Replication(RATE), 0.0, 0.0
    for number in range(1000):
        now_s = number * 0.5
        copied += 300 if rule.decide("a:1", number, 300, now_s) == "copy" else 0
    assert 0.9 * RATE * now_s < copied <= RATE * now_s + 10 * RATE


def test_a_prefix_larger_than_the_bound_is_copied_after_a_pause() -> None:
    rule = Replication(RATE)
    assert rule.decide("a:1", 1, 5000, 0.0) == "copy"
    assert rule.decide("a:1", 2, 10, 20.0) == "bandwidth"
    assert rule.decide("a:1", 2, 10, 60.0) == "copy"


def view_of(**changes: object) -> ClusterView:
    """Three prefill workers, two of which have five blocks of the prompt, and a decode worker that has six."""
    worker = WorkerView("w0", "prefill", "a:0", 1000, 64, 100, 100, prefill_model=PrefillModel(0.1, 1e-3), holder=0)
    workers = [replace(worker, worker_id=f"w{n}", address=f"a:{n}", holder=n, fetch_s_per_token=1e-5) for n in range(4)]
    workers[3] = replace(workers[3], role="decode")
    workers[2] = replace(workers[2], **changes)  # type: ignore[arg-type]
    return ClusterView(workers)


def placed(view: ClusterView, row: int, *queue_s: float) -> Placement:
    zeros = np.zeros(view.num_rows)
    queues = np.array([*queue_s, 0.0])
    worker = view.worker(row)
    ttft_s = queues[row] + 0.1
    return Placement(worker, worker, ttft_s, ranked_by=TtftPrediction(queues + 0.1, zeros, zeros, queues))


def test_the_next_holder_is_less_busy_than_all_that_have_the_prefix() -> None:
    view = view_of()
    assert next_holder(view, PROMPT, placed(view, 0, 0.0, 0.5, 0.0)) == NextHolder(2, 6, 4)
    short = replace(PROMPT, num_prompt_tokens=5 * 64 + 1)
    assert next_holder(view, short, placed(view, 0, 0.0, 0.5, 0.0)) == NextHolder(2, 5, 3)


def test_no_copy_where_a_holder_is_free_or_nobody_else_can_load() -> None:
    view, short = view_of(), replace(PROMPT, num_prompt_tokens=5 * 64 + 1)
    assert next_holder(view, short, placed(view, 0, 0.0, 0.0, 0.0)) is None, "the other one is free"
    assert next_holder(view, short, placed(view, 0, 0.0, 0.5, 0.7)) is None, "the third is busier"
    for changes in ({"fetch_s_per_token": math.inf}, {"draining": True}):
        view = view_of(**changes)
        assert next_holder(view, short, placed(view, 0, 0.0, 0.5, 0.0)) is None
    nothing = replace(PROMPT, cached_blocks=np.zeros(5, dtype=np.int64))
    assert next_holder(view_of(), nothing, placed(view, 0, 0.0, 0.5, 0.0)) is None


def test_a_copy_goes_to_a_worker_of_the_same_kind_of_kv_with_room() -> None:
    """The prefix counts as far as such workers have it: the decode worker, which has six blocks, is of another kind."""
    view = view_of()
    queues = 0.0, 0.5, 0.0
    same_kv = np.array([True, True, True, False])
    assert next_holder(view, PROMPT, placed(view, 0, *queues), same_kv) == NextHolder(2, 5, 3)
    same_kv[2] = False
    assert next_holder(view, PROMPT, placed(view, 0, *queues), same_kv) is None
    for free_blocks, target in ((3, None), (4, NextHolder(2, 6, 4))):
        view = view_of(free_blocks=free_blocks)
        view.remove("w1")  # no room is asked of who has most of it
        view.put(replace(view.worker(0), worker_id="w1", address="a:1", holder=1))
        assert next_holder(view, PROMPT, placed(view, 0, *queues)) == target
