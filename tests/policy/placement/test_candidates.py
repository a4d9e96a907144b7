"""The reasons of a placement, and previews of other targets."""

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
from halfmoon.policy.values import AdmissionTargets, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView
from services.gateway.control.target_preview import PastRequest, preview_targets
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


def past(predicted_s: float, *, refused: bool = False, ttft_s: float | None = 0.4) -> PastRequest:
    return PastRequest(refused, predicted_s, 0.01, None if refused else ttft_s, None if refused else 0.01)


def test_stricter_targets_refuse_more() -> None:
    requests = [past(0.3), past(0.8), past(2.0, refused=True)]
    found = preview_targets(requests, AdmissionTargets(1.0, None), AdmissionTargets(0.5, None))
    assert (found.num_requests, found.num_refused, found.num_would_be_refused) == (3, 1, 2)
    assert (found.num_served, found.num_meeting, found.num_newly_admitted) == (1, 1, 0)


def test_looser_targets_admit_what_they_explain_and_nothing_else() -> None:
    for_its_share = past(0.3, refused=True)  # the targets did not forbid it
    found = preview_targets(
        [past(2.0, refused=True), for_its_share], AdmissionTargets(1.0, None), AdmissionTargets(None, None)
    )
    assert (found.num_would_be_refused, found.num_newly_admitted) == (1, 1)


def test_of_a_lower_bound_only_a_refusal_is_sure() -> None:
    unread = past(2.0, refused=True)._replace(is_lower_bound=True)
    for allowed_s, counts in ((1.5, (1, 0, 0)), (3.0, (0, 0, 1))):
        found = preview_targets([unread], AdmissionTargets(1.0, None), AdmissionTargets(allowed_s, None))
        assert (found.num_would_be_refused, found.num_newly_admitted, found.num_undecided) == counts


def test_one_token_misses_no_tbt() -> None:
    one = PastRequest(False, 0.3, None, 0.3, None)
    found = preview_targets([one], AdmissionTargets(None, None), AdmissionTargets(1.0, 1e-6))
    assert (found.num_would_be_refused, found.num_meeting) == (0, 1)


@given(st.lists(st.builds(past, st.floats(0.01, 5), refused=st.booleans(), ttft_s=st.floats(0.01, 5))))
def test_the_same_targets_change_nothing(requests: list[PastRequest]) -> None:
    """Where what was refused is what they forbid, and the other way round."""
    targets = AdmissionTargets(1.0, 0.5)
    consistent = [one for one in requests if one.was_refused or one.predicted_ttft_s <= 1.0]
    found = preview_targets(consistent, targets, targets)
    assert found.num_would_be_refused == found.num_refused
    assert found.num_newly_admitted == 0
