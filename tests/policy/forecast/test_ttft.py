"""TTFT estimates: queue, restore and prefill of every row at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.forecast.ttft import best_sources, predict_ttft, prefill_seconds
from halfmoon.policy.models.latency import PrefillModel, num_pairs
from halfmoon.policy.values import PlacementRequest, TtftPrediction
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.fetch_costs import FetchLink
from halfmoon.policy.view.worker_view import WorkerView
from tests.policy.view.test_link_speeds import Link

P = WorkerView("p", "prefill", "p:1", 9_000, 10, 900, 900, prefill_model=PrefillModel(0.1, 0.01, 1e-6))

workers = st.lists(
    st.builds(
        lambda free_s, fetch_s, store: replace(P, prefill_free_s=free_s, fetch_s_per_token=fetch_s, store_holder=store),
        st.floats(0, 100),
        st.floats(1e-6, 1e-1) | st.just(np.inf),
        st.integers(-1, 7),
    ),
    min_size=1,
    max_size=4,
)


def view_of(members: list[WorkerView]) -> ClusterView:
    return ClusterView(replace(member, worker_id=f"p{i}", holder=i) for i, member in enumerate(members))


def estimate(view: ClusterView, blocks: list[int], threshold: float | None = 2.0) -> TtftPrediction:
    request = PlacementRequest(1_000, 10, cached_blocks=np.array([*blocks, 0]))
    return predict_ttft(view, request, threshold, 10.0)


@given(workers, st.lists(st.integers(0, 200), min_size=8, max_size=8), st.none() | st.floats(0, 4))
def test_fetching_never_makes_a_prompt_later(
    members: list[WorkerView], blocks: list[int], threshold: float | None
) -> None:
    view = view_of(members)
    ttft = estimate(view, blocks, threshold)
    computed_s = ttft.queue_s + prefill_seconds(view, ttft.cached_tokens, 1_000.0)
    assert (ttft.seconds <= computed_s).all()
    assert (ttft.cached_tokens + ttft.fetched_tokens < 1_000).all()  # a token is left to compute
    assert (ttft.fetched_tokens >= 0).all()


@given(workers, st.integers(0, 900), st.integers(1, 1_200))
def test_every_row_counts_what_the_prompt_sees_as_a_model_does(
    members: list[WorkerView], cached: int, most_seen: int
) -> None:
    view = view_of(members)
    seconds = prefill_seconds(view, np.full(len(members), float(cached)), 1_000.0, most_seen)
    expected = [one.prefill_model.seconds(1_000 - cached, cached, most_seen) for one in members]
    assert seconds == pytest.approx(expected)
    pairs = sum(min(position + 0.5, most_seen) for position in range(cached, 1_000))
    assert num_pairs(cached, 1_000 - cached, most_seen) == pytest.approx(pairs)


@given(workers, st.lists(st.integers(0, 200), min_size=8, max_size=8))
def test_rows_do_not_depend_on_each_other_without_fetching(members: list[WorkerView], blocks: list[int]) -> None:
    together = estimate(view_of(members), blocks, None)
    for row, member in enumerate(members):
        alone = ClusterView([replace(member, holder=row)])
        for other in members:
            if other.store_holder >= 0:
                alone.fetch_links.note_store(other.store_holder)
        single = estimate(alone, blocks, None)
        assert together.seconds[row] == pytest.approx(single.seconds[0])


def test_the_queue_is_what_the_worker_reported_or_what_waits_says() -> None:
    view = view_of([replace(P, prefill_free_s=13.0), P])
    assert estimate(view, [0, 0]).queue_s.tolist() == [3.0, 0.0]
    ttft = predict_ttft(view, PlacementRequest(100, 10), None, 10.0, lambda reported_s, takes_s: reported_s + takes_s)
    alone_s = P.prefill_model.seconds(100)
    assert ttft.queue_s.tolist() == pytest.approx([3.0 + alone_s, alone_s])
    assert ttft.seconds.tolist() == pytest.approx([3.0 + 2 * alone_s, 2 * alone_s])


def test_the_measured_link_decides_from_whom_to_fetch() -> None:
    view = view_of([replace(P, fetch_s_per_token=1e-4), P, P, P])
    view.fetch_links.report(0, [FetchLink(1, 1e-3), FetchLink(2, 1e-5), FetchLink(3, 1e-5, wait_s=0.1)])
    blocks = [0, 50, 50, 50]
    ttft = estimate(view, blocks)
    assert ttft.source_of(0) == 2
    assert ttft.transfer_s_of(0) == pytest.approx(500 * 1e-5, rel=0.01)
    request = PlacementRequest(1_000, 10, cached_blocks=np.array([*blocks, 0]))
    assert best_sources(view, 0, request, 2.0, 0.0, 4) == [2, 3, 1]
    assert best_sources(view, 0, request, 2.0, 0.0, 1) == [2]
    assert best_sources(view, 0, request, None, 0.0, 4) == []
    assert ttft.source_of(1) == -1, "it has the prefix itself"


def test_a_failover_counts_what_a_link_took_in_the_other_direction() -> None:
    """Decode workers have loaded nothing over it, but the holder has sent to them."""
    loading = replace(P, address="q:1", fetch_s_per_token=1e-6)
    view = view_of([replace(P, kv_bytes_per_token=1000), loading])
    view.links.report(0, [Link("q:1", 1e6)])  # 1 ms a token
    for is_failover, measured, s_per_token in ((False, [], 1e-6), (True, [], 1e-3), (True, [FetchLink(0, 1e-4)], 1e-4)):
        view.fetch_links.report(1, measured)
        request = PlacementRequest(1_000, 10, cached_blocks=np.array([99, 0, 0]), is_failover=is_failover)
        ttft = predict_ttft(view, request, 2.0, 10.0)
        assert ttft.transfer_s_of(1) == pytest.approx(990 * s_per_token, rel=0.1)


def test_a_shorter_prefix_that_is_near_may_beat_a_longer_one_far_away() -> None:
    view = view_of([replace(P, fetch_s_per_token=1e-4), P, P])
    view.fetch_links.report(0, [FetchLink(1, 1.0), FetchLink(2, 1e-6)])
    ttft = estimate(view, [0, 90, 60])
    assert (ttft.source_of(0), ttft.fetched_tokens[0]) == (2, 600)


def test_the_threshold_holds_for_workers_and_not_for_stores() -> None:
    view = view_of([replace(P, fetch_s_per_token=1e-6), P])
    for threshold, sources in ((1.9, 1), (2.0, -1), (4.0, -1), (None, -1)):
        assert estimate(view, [30, 60], threshold).source_of(0) == sources
    view.fetch_links.note_store(1)
    for threshold in (1.9, 4.0, None):
        assert estimate(view, [30, 60], threshold).source_of(0) == 1


def test_a_step_that_waits_for_layers_begins_before_all_is_loaded() -> None:
    """500 tokens take 5 s to load and 500 more 5.1 to compute: the meeting is after 2.5 s, a fifth there after 1."""
    by_block = replace(P, fetch_s_per_token=0.01, step_tokens=1_000)
    for waiting, is_store, ready_s in ((by_block, False, 2.5), (replace(by_block, layer_passes=5), True, 2.5)):
        view = view_of([waiting, P])
        if is_store:
            view.fetch_links.note_store(1)
        assert estimate(view, [0, 50]).ready_s_of(0) == pytest.approx(ready_s, rel=0.1)
    ttft = estimate(view_of([replace(by_block, layer_passes=5, prefill_free_s=10.3), P]), [0, 50])
    step_s = P.prefill_model.seconds(500, 500)
    assert ttft.ready_s_of(0) == pytest.approx(1.04)
    assert ttft.transfer_s_of(0) == pytest.approx(5.0)
    assert ttft.seconds[0] == pytest.approx(1.04 + step_s)
    small = view_of([replace(by_block, layer_passes=5), replace(P, total_blocks=8 * 98)])
    assert estimate(small, [0, 50]).ready_s_of(0) == pytest.approx(2.5, rel=0.1), "one reader may hold 49 blocks of it"


def test_a_busy_worker_has_no_layers_come_later_than_its_blocks() -> None:
    """10 ms of loading, 40 ms more by layer, and a queue of a second before the step may begin."""
    waiting = replace(P, fetch_s_per_token=2e-5, step_tokens=1_000, layer_passes=5, prefill_free_s=11.0)
    ttft = estimate(view_of([waiting, P]), [0, 50])
    assert ttft.transfer_s_of(0) == pytest.approx(0.01)
    assert ttft.ready_s_of(0) == ttft.transfer_s_of(0)


def test_a_transfer_that_waits_for_others_is_weighed_against_computing() -> None:
    view = view_of([replace(P, fetch_s_per_token=1e-4), P])
    for wait_s, source in ((0.0, 1), (1e3, -1)):
        view.fetch_links.report(0, [FetchLink(1, 1e-5, wait_s)])
        assert estimate(view, [0, 90]).source_of(0) == source
