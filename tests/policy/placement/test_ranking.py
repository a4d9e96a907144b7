"""Ranking: the cheapest worker by placement mode, with ties, targets and room."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.forecast.handover import HandoverPrediction
from halfmoon.policy.forecast.ttft import predict_ttft
from halfmoon.policy.models.latency import Floats, PrefillModel, StepModel
from halfmoon.policy.placement.ranking import PlacementMode, Ranking, predict_tbt, with_speed_ties
from halfmoon.policy.values import (
    NO_TARGETS,
    AdmissionTargets,
    DecodeLoads,
    DecodeReason,
    PlacementRequest,
    PrefillReason,
    TtftPrediction,
)
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView

P = WorkerView("p0", "prefill", "a:1", 9_000, 10, 900, 900, prefill_model=PrefillModel(0.1, 0.01, 0.0))
D = WorkerView("d0", "decode", "d:1", 9_000, 10, 900, 900, step_model=StepModel(0.01, 0.001, 0.0))


def prefills(*queues_s: float) -> ClusterView:
    return ClusterView(
        replace(P, worker_id=f"p{number}", address=f"{number}:1", prefill_free_s=queue_s)
        for number, queue_s in enumerate(queues_s)
    )


def ttft_on(view: ClusterView) -> TtftPrediction:
    return predict_ttft(view, PlacementRequest(100, 10), None, 0.0)


def ranking_of(
    view: ClusterView, mode: PlacementMode = "kvcache-centric", targets: AdmissionTargets = NO_TARGETS
) -> Ranking:
    return Ranking(view, mode, PlacementRequest(100, 101, targets=targets))


def all_rows(view: ClusterView) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.ones(view.num_rows, dtype=np.bool_)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.integers(0, 9))
def test_the_best_prefill_is_within_a_hundredth_of_the_least_ttft(queues_s: list[float], seed: int) -> None:
    view = prefills(*queues_s)
    ttft = ttft_on(view)
    row = ranking_of(view).best_prefill(ttft, all_rows(view), random.Random(seed))
    assert ttft.seconds[row] <= 1.0100001 * ttft.seconds.min()


def test_ties_are_broken_at_random() -> None:
    view, rng = prefills(0.0, 0.005, 0.5), random.Random(0)
    ttft, ranking = ttft_on(view), ranking_of(view)
    counts = Counter(ranking.best_prefill(ttft, all_rows(view), rng) for _ in range(200))
    assert counts.keys() == {0, 1}
    assert min(counts.values()) > 50


def test_elsewhere_is_another_host_of_the_same_role() -> None:
    view = ClusterView((P, replace(P, worker_id="p1", address="a:2"), replace(P, worker_id="p2", address="b:1")))
    ttft, rows, rng = ttft_on(view), all_rows(view), random.Random(0)
    assert ranking_of(view).best_elsewhere(ttft, rows, 0, rng) == 2
    assert ranking_of(view).best_elsewhere(ttft, np.array([True, True, False]), 0, rng) is None
    assert ranking_of(view).best_elsewhere(ttft, np.array([False, True, True]), 0, rng) is None
    assert ranking_of(view, "least-loaded").best_elsewhere(ttft, rows, 0, rng) is None
    assert ranking_of(view, "random").best_elsewhere(ttft, rows, 0, rng) is None


def loads(*batches: float) -> DecodeLoads:
    return DecodeLoads(np.array(batches), 100 * np.array(batches))


def handed_over(
    view: ClusterView, exposed_s: Sequence[float] = (0.0,), held_tokens: Sequence[float] = (0.0,)
) -> HandoverPrediction:
    whole = np.ones(view.num_rows)
    return HandoverPrediction(np.array(exposed_s) * whole, 0 * whole, np.array(held_tokens) * whole)


def decodes(num: int, **options: Any) -> ClusterView:
    return ClusterView(replace(D, worker_id=f"d{number}", **options) for number in range(num))


@pytest.mark.parametrize(
    ("batches", "exposed_s", "held", "best"),
    [
        ((3, 0), (0.0, 0.0), (90, 0), 0),  # a busier worker keeps the chat: 14 ms a token instead of 11 ms
        ((0, 0), (0.0, 0.0), (40, 0), 0),  # of equals, the one that has most
        ((3, 0), (0.0, 0.0), (40, 0), 1),  # a shared beginning is no conversation
        ((0, 0, 0), (0.0, 0.0, 0.0), (60, 90, 0), 1),
        ((0, 0), (0.2, 0.0), (0, 0), 1),  # what the hand-over adds to 100 gaps
        ((0, 1), (0.2, 0.0), (0, 0), 1),
        ((0, 3), (0.2, 0.0), (0, 0), 0),
    ],
)
def test_a_chat_stays_with_its_decode_worker_unless_another_is_clearly_better(
    batches: tuple[float, ...], exposed_s: tuple[float, ...], held: tuple[float, ...], best: int
) -> None:
    view = decodes(len(batches), step_model=StepModel(0.02, 0.001, 0.0))
    ranking, rng = ranking_of(view), random.Random(0)
    found = {
        ranking.best_decode(loads(*batches), handed_over(view, exposed_s, held), all_rows(view), rng).row
        for _ in range(20)
    }
    assert found == {best}


def test_a_chat_leaves_a_decode_worker_that_misses_the_target() -> None:
    view, rng = decodes(2), random.Random(0)
    for tbt_s, best in ((0.0115, 1), (0.02, 0), (0.001, 0)):
        ranking = ranking_of(view, targets=AdmissionTargets(None, tbt_s))
        assert (
            ranking.best_decode(loads(1, 0), handed_over(view, held_tokens=(100, 0)), all_rows(view), rng).row == best
        )
    assert (
        ranking_of(view).best_decode(loads(5, 0), handed_over(view, held_tokens=(100, 0)), all_rows(view), rng).row == 1
    )


def test_a_decode_worker_is_chosen_for_a_reason() -> None:
    rng = random.Random(0)
    cases: list[tuple[ClusterView, PlacementMode, tuple[float, ...], tuple[float, ...], DecodeReason]] = [
        (decodes(1), "kvcache-centric", (0,), (100,), "only"),
        (decodes(2), "kvcache-centric", (0, 0), (60, 0), "stays"),
        (decodes(2), "kvcache-centric", (0, 0), (40, 0), "most_held"),
        (decodes(2), "kvcache-centric", (9, 0), (0, 0), "least_cost"),
        (decodes(2), "least-loaded", (9, 0), (0, 0), "least_loaded"),
        (decodes(2), "random", (9, 0), (0, 0), "random"),
    ]
    for view, mode, batches, held, reason in cases:
        ranking = ranking_of(view, mode)
        found = ranking.best_decode(loads(*batches), handed_over(view, held_tokens=held), all_rows(view), rng)
        assert found.reason == reason


def test_a_prefill_worker_is_chosen_for_a_reason() -> None:
    view = ClusterView(replace(P, worker_id=f"p{number}") for number in range(2))
    rows, nothing = all_rows(view), np.zeros(2)
    cases: list[tuple[PlacementMode, tuple[float, ...], tuple[float, ...], tuple[float, ...], PrefillReason]] = [
        ("kvcache-centric", (50, 0), (0, 0), (1, 0), "cached"),
        ("kvcache-centric", (10, 60), (50, 0), (0, 1), "loaded"),
        ("kvcache-centric", (50, 50), (0, 0), (0, 1), "shortest_queue"),
        ("cache-aware", (0, 0), (0, 0), (0, 0), "least_ttft"),
        ("least-loaded", (50, 0), (0, 0), (1, 0), "least_loaded"),
        ("random", (50, 0), (0, 0), (1, 0), "random"),
    ]
    for mode, cached, fetched, queue_s, reason in cases:
        ttft = TtftPrediction(nothing, np.array(cached), np.array(fetched), np.array(queue_s))
        assert ranking_of(view, mode).why_prefill(ttft, rows, 0) == reason
    assert ranking_of(view).why_prefill(ttft, np.array([True, False]), 0) == "only"


@pytest.mark.parametrize("mode", ["least-loaded", "random"])
def test_baselines_do_not_ask_what_a_handover_costs(mode: PlacementMode) -> None:
    view, rng = decodes(2), random.Random(0)
    handover = handed_over(view, (0.0, 9.0), (100, 0))
    found = {ranking_of(view, mode).best_decode(loads(0, 0), handover, all_rows(view), rng).row for _ in range(50)}
    assert found == {0, 1}


@pytest.mark.parametrize("mode", get_args(PlacementMode))
def test_decode_workers_with_room_come_first(mode: PlacementMode) -> None:
    view = ClusterView((replace(D, free_blocks=10), replace(D, worker_id="d1")))
    for seed in range(20):
        assert (
            ranking_of(view, mode).best_decode(loads(0, 9), handed_over(view), all_rows(view), random.Random(seed)).row
            == 1
        )


def test_decode_workers_that_meet_the_target_come_first_if_there_are_any() -> None:
    slower = replace(D, worker_id="d1", step_model=StepModel(0.011, 0.001, 0.0))  # within a learning error
    view, rng = ClusterView((D, slower)), random.Random(0)
    for tbt_s, rows in ((None, {0, 1}), (0.0115, {0}), (0.02, {0, 1}), (0.001, {0, 1})):
        ranking = ranking_of(view, targets=AdmissionTargets(None, tbt_s))
        assert {ranking.best_decode(loads(0, 0), handed_over(view), all_rows(view), rng).row for _ in range(50)} == rows


def test_the_tbt_of_a_row_includes_the_new_request() -> None:
    view = ClusterView((D, replace(D, worker_id="d1", step_model=StepModel(0.0, 0.0, 1e-3))))
    assert predict_tbt(view, loads(2, 2), 50).tolist() == pytest.approx([0.013, 0.25])


costs = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10), st.booleans()), min_size=1, max_size=8)


@given(costs.filter(lambda rows: any(among for _, _, among in rows)))
def test_speed_ties_change_only_rows_of_about_the_best_speed(entries: list[tuple[float, float, bool]]) -> None:
    cost, unloaded_s, rows = (np.array(column) for column in zip(*entries, strict=True))
    tied: Floats = with_speed_ties(cost, unloaded_s, rows)
    among = np.flatnonzero(rows)
    best = among[np.argmin(cost[among])]
    assert tied[best] == cost[best]
    for row in np.flatnonzero(tied != cost):
        assert rows[row]
        ratio = unloaded_s[row] / unloaded_s[best]
        assert 1 / 1.1501 < ratio < 1.1501
        assert tied[row] == pytest.approx(cost[row] / ratio)
