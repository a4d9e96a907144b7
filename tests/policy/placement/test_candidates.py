"""The reasons of a placement."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.latency import PrefillModel
from halfmoon.policy.placement.candidates import ranked_candidates
from halfmoon.policy.placement.place import PlacementRules, place
from halfmoon.policy.values import PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView
from tests.policy.reported_state import ReportedState

SPEED = PrefillModel(0.001, 0.0001, 1e-8)
PREFILL = WorkerView("p0", "prefill", "h:1", 100_000, 64, 1_000, 1_000, prefill_model=SPEED, holder=0)
DECODE = replace(PREFILL, worker_id="d0", role="decode", holder=-1)


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 10), st.booleans()), min_size=1, max_size=8))
def test_the_parts_add_up_to_what_placement_predicts(workers: list[tuple[float, int, bool]]) -> None:
    cached_blocks = np.array([num_blocks for _, num_blocks, _ in workers] + [0])
    prefills = [
        replace(
            PREFILL, worker_id=f"p{i}", prefill_free_s=free_s, holder=i, fetch_s_per_token=1e-5 if fetches else np.inf
        )
        for i, (free_s, _, fetches) in enumerate(workers)
    ]
    view, rules = ClusterView([*prefills, DECODE]), PlacementRules()
    request = PlacementRequest(1_000, 10, cached_blocks=cached_blocks)
    placement = place(view, request, rules, ReportedState(view, rules), 0.0, random.Random(0))
    chosen = placement.prefill.worker_id
    assert placement.ranked_by is not None
    found = ranked_candidates(view, 1_000, placement.ranked_by, 3, placement)
    assert len(found) <= 4
    assert all(one.queue_s >= 0 and one.restore_s >= 0 and one.compute_s > 0 for one in found)
    (it,) = (one for one in found if one.worker_id == chosen)
    assert it.ttft_s == pytest.approx(placement.ttft_s)
    assert (it.cached_tokens, it.fetched_tokens) == (placement.cached_tokens, placement.fetched_tokens)
    assert found[0].ttft_s <= it.ttft_s * 1.0001
    refined = replace(placement, queue_s=placement.queue_s + 1, ttft_s=placement.ttft_s + 3, overhead_s=0.5)
    (it,) = (one for one in ranked_candidates(view, 1_000, placement.ranked_by, 3, refined) if one.worker_id == chosen)
    assert it.queue_s == refined.queue_s
    assert it.ttft_s == pytest.approx(refined.ttft_s - 0.5)
