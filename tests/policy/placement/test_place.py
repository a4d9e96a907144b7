"""Placement is a function of the cluster view, the block index and chance."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import Unavailable
from halfmoon.policy.forecast.restore_plan import RestoreCosts, meeting_point
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.placement.place import ContextLengthExceeded, PlacementRules, place
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.policy.values import (
    NO_TARGETS,
    NOTHING_CACHED,
    AdmissionTargets,
    DecodeLoads,
    Placement,
    PlacementRequest,
)
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import Role, WorkerView
from tests.policy.reported_state import ReportedState

PREFILL = PrefillModel(0.01, 1e-3, 0.0)
STEP = StepModel(0.01, 1e-3, 1e-6)


def worker(worker_id: str, role: Role, **changed: Any) -> WorkerView:
    plain = WorkerView(worker_id, role, f"{worker_id}:1", 1000, 16, 100, 100)
    return replace(plain, **changed)


def placed(
    *workers: WorkerView,
    exclude: tuple[str, ...] = (),
    num_prompt_tokens: int = 100,
    max_tokens: int = 50,
    mode: PlacementMode = "kvcache-centric",
    seed: int = 0,
    cached_blocks: np.ndarray[Any, Any] = NOTHING_CACHED,
    targets: AdmissionTargets = NO_TARGETS,
    loads_at: Callable[[float], DecodeLoads] | None = None,
) -> Placement:
    request = PlacementRequest(num_prompt_tokens, max_tokens, exclude, targets=targets, cached_blocks=cached_blocks)
    view, rules = ClusterView(workers), PlacementRules(mode)
    return place(view, request, rules, ReportedState(view, rules, loads_at), 0.0, random.Random(seed))


def chosen(*workers: WorkerView, **more: Any) -> tuple[str, str]:
    placement = placed(*workers, **more)
    return placement.prefill.worker_id, placement.decode.worker_id


P0, P1 = worker("p0", "prefill"), worker("p1", "prefill")
D0, D1 = worker("d0", "decode"), worker("d1", "decode")
B0 = worker("b0", "both")


def test_the_least_loaded_of_each_half_while_no_speed_is_known() -> None:
    assert chosen(replace(P0, waiting_prefill_tokens=1), P1, replace(D0, num_running=1), D1) == ("p1", "d1")
    assert chosen(P0, replace(D0, num_reserved=1), D1) == ("p0", "d1")
    assert chosen(P0, replace(D0, num_placed=1), D1) == ("p0", "d1")


def test_room_now_goes_before_few_requests() -> None:
    assert chosen(P0, replace(D0, free_blocks=2), replace(D1, num_running=30)) == ("p0", "d1")
    assert chosen(P0, replace(D0, free_blocks=2)) == ("p0", "d0")  # it may have some by then


def test_a_paired_unit_hands_over_within_itself() -> None:
    units = [replace(one, unit=f"unit-{one.worker_id[1]}") for one in (P0, P1, D0, D1)]
    busy = [replace(one, num_running=20) if one.worker_id == "d0" else one for one in units]
    first = replace(P1, unit="unit-1", waiting_prefill_tokens=500)
    assert chosen(busy[0], first, *busy[2:]) == ("p0", "d0"), "d1 has nothing to do and is of the other unit"
    assert chosen(busy[0], first, *busy[2:], exclude=("d0",)) == ("p0", "d1"), "none of its own is left"
    assert chosen(P0, first, *busy[2:]) == ("p0", "d1"), "it is in no unit"
    assert {chosen(*units, seed=seed) for seed in range(20)} == {("p0", "d0"), ("p1", "d1")}


def test_a_worker_of_both_roles_is_both_halves() -> None:
    placement = placed(B0)
    assert placement.is_colocated
    assert placement.decode_address == ""
    assert chosen(replace(B0, waiting_prefill_tokens=9), P0, D0) == ("p0", "d0")
    assert chosen(B0, replace(P0, waiting_prefill_tokens=9), D0) == ("b0", "b0")
    assert placed(P0, D0).decode_address == "d0:1"


def test_who_is_not_ready_is_not_chosen() -> None:
    assert chosen(replace(P0, draining=True), P1, replace(D0, listening=False), D1) == ("p1", "d1")
    assert chosen(P0, P1, D0, D1, exclude=("p0", "d0")) == ("p1", "d1")


def test_what_is_missing_is_said() -> None:
    for view, missing in (
        ((), "no prefill worker and no decode worker"),
        ((P0,), "no decode worker"),
        ((P0, replace(D0, listening=False)), "no decode worker"),
        ((D0, replace(P0, draining=True)), "no prefill worker"),
        ((replace(B0, listening=False),), "no prefill worker and no decode worker"),
    ):
        with pytest.raises(Unavailable, match=missing) as caught:
            placed(*view)
        assert caught.value.retry_after_ms
    assert ClusterView((P0, D0)).missing == ()
    assert ClusterView((B0,)).missing == ()


def test_too_long_for_anybody() -> None:
    for num_prompt_tokens, max_tokens in ((1000, 1), (900, 200)):
        with pytest.raises(ContextLengthExceeded) as caught:
            placed(P0, D0, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        assert caught.value.retry_after_ms is None
    with pytest.raises(ContextLengthExceeded, match=r"40 tokens of prompt and 10 of output .* at most 32 tokens"):
        placed(P0, replace(D0, total_blocks=2), num_prompt_tokens=40, max_tokens=10)


def test_all_excluded() -> None:
    with pytest.raises(Unavailable, match="refused"):
        chosen(P0, D0, exclude=("d0",))


WORKERS = st.builds(
    WorkerView,
    worker_id=st.sampled_from([f"w{i}" for i in range(6)]),
    role=st.sampled_from(["prefill", "decode", "both"]),
    address=st.just("h:1"),
    context_tokens=st.integers(1, 300),
    block_tokens=st.just(16),
    total_blocks=st.integers(1, 20),
    free_blocks=st.integers(0, 20),
    num_running=st.integers(0, 5),
    waiting_prefill_tokens=st.integers(0, 500),
    draining=st.booleans(),
    listening=st.booleans(),
)


@given(
    st.lists(WORKERS, max_size=6, unique_by=lambda one: one.worker_id),
    st.integers(1, 200),
    st.integers(1, 100),
    st.sampled_from(get_args(PlacementMode)),
)
def test_a_placement_is_always_one_that_can_work(
    workers: list[WorkerView], num_prompt: int, max_tokens: int, mode: PlacementMode
) -> None:
    try:
        placement = placed(
            *workers, num_prompt_tokens=num_prompt, max_tokens=max_tokens, exclude=("w0", "nobody"), mode=mode
        )
    except (Unavailable, ContextLengthExceeded):
        return
    prefill, decode = placement.prefill, placement.decode
    assert not prefill.draining
    assert not decode.draining
    assert decode.listening
    assert num_prompt + max_tokens <= decode.capacity_tokens
    assert "w0" not in (prefill.worker_id, decode.worker_id)
    assert (prefill.role, decode.role) in (("prefill", "decode"), ("both", "both"))
    assert (prefill is decode) == (prefill.role == "both") == (placement.decode_address == "")


FAST = {"prefill_model": PREFILL, "step_model": STEP}
Q0, Q1 = worker("q0", "prefill", holder=0, **FAST), worker("q1", "prefill", holder=1, **FAST)
E0, E1 = worker("e0", "decode", holder=2, **FAST), worker("e1", "decode", holder=3, **FAST)


def cached(*blocks: int) -> np.ndarray[Any, Any]:
    return np.array([*blocks, 0], dtype=np.int64)


def test_the_predictions() -> None:
    placement = placed(replace(Q0, prefill_free_s=0.5), E0, cached_blocks=cached(2, 0, 0))
    assert placement.cached_tokens == 32
    assert placement.ttft_s == pytest.approx(0.5 + PREFILL.seconds(68, 32))
    assert placement.tbt_s == pytest.approx(STEP.seconds(1, 100))
    busy = replace(E0, num_running=3, context_in_use_tokens=500)
    assert placed(Q0, busy).tbt_s == pytest.approx(STEP.seconds(4, 600))


def test_one_token_is_always_left_to_compute() -> None:
    placement = placed(Q0, E0, num_prompt_tokens=32, cached_blocks=cached(2, 0, 0, 0))
    assert placement.cached_tokens == 16


def test_a_prefix_is_weighed_against_a_queue() -> None:
    found = cached(4, 0, 0, 0)
    saved_s = PREFILL.seconds(100) - PREFILL.seconds(36, 64)
    assert chosen(replace(Q0, prefill_free_s=0.9 * saved_s), Q1, E0, cached_blocks=found) == ("q0", "e0")
    assert chosen(replace(Q0, prefill_free_s=1.1 * saved_s), Q1, E0, cached_blocks=found) == ("q1", "e0")


def test_the_best_holder_lends_its_prefix_where_that_pays() -> None:
    far = replace(Q1, fetch_s_per_token=1e-5)
    busy = replace(Q0, prefill_free_s=60.0)
    for found, fetched in ((cached(6, 0, 0, 0), 96), (cached(6, 2, 0, 0), 64), (cached(0, 0, 0, 6), 96)):
        placement = placed(busy, far, E0, cached_blocks=found)
        assert (placement.prefill.worker_id, placement.fetched_tokens) == ("q1", fetched)
        assert placement.ttft_s < PREFILL.seconds(100 - placement.cached_tokens, placement.cached_tokens)
    for near in (cached(6, 3, 0, 0), cached(6, 6, 0, 0)):  # not more than twice as much
        assert placed(busy, far, E0, cached_blocks=near).fetched_tokens == 0
    assert placed(
        busy, replace(far, fetch_s_per_token=1.0), E0, cached_blocks=cached(6, 0, 0, 0)
    ).ttft_s <= PREFILL.seconds(100)
    assert (
        placed(busy, replace(far, fetch_s_per_token=math.inf), E0, cached_blocks=cached(6, 0, 0, 0)).fetched_tokens == 0
    )
    assert placed(busy, far, E0, cached_blocks=cached(6, 0, 0, 0), mode="cache-aware").fetched_tokens == 0


def test_what_the_store_has_and_the_worker_lacks_is_restored() -> None:
    stored = replace(Q1, fetch_s_per_token=1e-5, store_holder=2)
    for own, fetched in ((0, 96), (2, 64), (5, 16), (6, 0)):  # whatever the ratio of the two
        placement = placed(stored, E0, cached_blocks=cached(0, own, 6, 0), mode="cache-aware")
        assert (placement.cached_tokens, placement.fetched_tokens) == (16 * own, fetched)
    assert placed(stored, E0, cached_blocks=cached(6, 0, 0, 0), mode="cache-aware").fetched_tokens == 0
    assert placed(stored, E0, cached_blocks=cached(6, 0, 0, 0)).fetched_tokens == 96  # another worker has it
    assert placed(replace(stored, fetch_s_per_token=math.inf), E0, cached_blocks=cached(0, 0, 6, 0)).fetched_tokens == 0
    busy = replace(Q0, prefill_free_s=0.05, fetch_s_per_token=1e-5, store_holder=2)
    assert placed(busy, stored, E0, cached_blocks=cached(6, 0, 6, 0)).prefill.worker_id == "q1"


@given(
    queue_s=st.floats(0, 0.2),
    load_s=st.floats(1e-6, 1e-2),
    alpha=st.floats(1e-5, 1e-2),
    beta=st.floats(0, 1e-5),
    own=st.integers(0, 6),
)
def test_a_restore_takes_what_its_plan_says(queue_s: float, load_s: float, alpha: float, beta: float, own: int) -> None:
    model = PrefillModel(0.0, alpha, beta)
    stored = replace(Q1, prefill_model=model, prefill_free_s=queue_s, fetch_s_per_token=load_s, store_holder=2)
    placement = placed(stored, E0, cached_blocks=cached(0, own, 6, 0))
    computed_s, missing = queue_s + model.seconds(100 - 16 * own, 16 * own), 96 - 16 * own
    costs = RestoreCosts(alpha + beta * 16 * own, load_s, beta, compute_queue_s=queue_s)
    restored_s = costs.restore_s(meeting_point(costs, missing), missing)
    both_s = max(queue_s, restored_s) + model.seconds(4, 96)
    assert placement.ttft_s == pytest.approx(min(computed_s, both_s) if missing else computed_s)


def test_the_decode_worker_with_the_least_tbt_when_the_prefill_ends() -> None:
    asked: list[float] = []

    def loads_at(at_s: float) -> DecodeLoads:
        asked.append(at_s)
        return DecodeLoads(np.array([0.0, 9.0, 2.0]), np.array([0.0, 900.0, 200.0]))

    assert chosen(Q0, E0, E1, loads_at=loads_at) == ("q0", "e1")
    assert asked == [pytest.approx(PREFILL.seconds(100))]


@pytest.mark.parametrize("mode", get_args(PlacementMode))
def test_equal_workers_share_the_load(mode: PlacementMode) -> None:
    slightly = replace(Q1, prefill_model=PrefillModel(0.01, 1.001e-3, 0.0))
    counts = Counter(chosen(Q0, slightly, E0, E1, mode=mode, seed=seed) for seed in range(400))
    assert len(counts) == 4
    assert min(counts.values()) > 50


C0 = worker("c0", "both", holder=0, chunk_tokens=64, **FAST)
C1 = replace(C0, worker_id="c1", holder=1)


def both_shares(*workers: WorkerView, **more: Any) -> dict[str, int]:
    return dict(Counter(chosen(*workers, seed=seed, **more)[0] for seed in range(200)))


def slower(plain: WorkerView, factor: float) -> WorkerView:
    models = (PrefillModel(*(factor * one for one in PREFILL)), StepModel(*(factor * one for one in STEP)))
    return replace(plain, prefill_model=models[0], step_model=models[1])


@pytest.mark.parametrize("factor", [0.88, 1.12])
def test_workers_that_do_both_share_the_load_though_one_is_believed_quicker(factor: float) -> None:
    shares = both_shares(C0, slower(C1, factor))
    assert min(shares["c0"], shares["c1"]) > 50
    assert both_shares(C0, slower(C1, 1.3)) == {"c0": 200}  # that is more than learning errs


def decode_shares(*decoding: WorkerView, **more: Any) -> dict[str, int]:
    return dict(Counter(chosen(Q0, *decoding, seed=seed, **more)[1] for seed in range(200)))


@pytest.mark.parametrize("factor", [0.88, 1.12])
def test_decode_workers_share_the_load_though_one_is_believed_quicker(factor: float) -> None:
    shares = decode_shares(E0, slower(E1, factor))
    assert min(shares["e0"], shares["e1"]) > 50
    assert decode_shares(E0, slower(E1, 1.3)) == {"e0": 200}  # that is more than learning errs
    busy = replace(E0, num_running=2, context_in_use_tokens=200)
    assert decode_shares(busy, slower(E1, factor)) == {"e1": 200}
    assert placed(Q0, busy, slower(E1, factor)).tbt_s == pytest.approx(factor * STEP.seconds(1, 100))  # as believed


def test_a_decode_worker_that_meets_the_target_goes_first() -> None:
    tbt_s = STEP.seconds(1, 100)
    for seed in range(20):
        targets = AdmissionTargets(None, 1.05 * tbt_s)
        assert chosen(Q0, E0, slower(E1, 1.12), targets=targets, seed=seed)[1] == "e0"


def test_of_equal_ttfts_the_lighter_of_those_that_do_both() -> None:
    busy = replace(C0, num_running=1, context_in_use_tokens=100)
    for other in (C1, slower(C1, 1.12)):
        assert both_shares(busy, other) == {"c1": 200}
    waits = replace(C1, prefill_free_s=0.05 * PREFILL.seconds(100))
    assert both_shares(busy, waits) == {"c0": 200}  # its TTFT is less


def test_a_prefix_counts_more_than_a_light_load() -> None:
    busy = replace(C0, num_running=9, context_in_use_tokens=900)
    for other in (C1, slower(C1, 0.88)):
        assert both_shares(busy, other, cached_blocks=cached(2, 0)) == {"c0": 200}


def targeted(*workers: WorkerView, targets: AdmissionTargets) -> str:
    return chosen(*workers, targets=targets)[0]


def test_who_would_miss_a_target_goes_behind_who_meets_both() -> None:
    crowded = replace(C0, num_running=50, context_in_use_tokens=5000)
    later = replace(C1, prefill_free_s=0.1)
    ttft_s, tbt_s = 0.1 + PREFILL.seconds(100), STEP.seconds(1, 100)
    assert targeted(crowded, later, targets=AdmissionTargets(None, None)) == "c0"
    assert targeted(crowded, later, targets=AdmissionTargets(2 * ttft_s, 2 * tbt_s)) == "c1"
    assert targeted(crowded, later, targets=AdmissionTargets(ttft_s - 0.05, 2 * tbt_s)) == "c0"  # nobody meets both
    assert targeted(crowded, later, Q0, E0, targets=AdmissionTargets(ttft_s - 0.05, 2 * tbt_s)) == "q0"


def test_least_loaded_asks_no_predictions_of_those_that_do_both() -> None:
    waits = replace(C0, waiting_prefill_tokens=10)
    full = replace(C1, num_running=50)
    assert both_shares(waits, full, mode="least-loaded") == {"c1": 200}
    assert both_shares(C0, full, mode="least-loaded") == {"c0": 200}


def test_random_ignores_and_least_loaded_counts() -> None:
    busy = replace(Q0, waiting_prefill_tokens=900, prefill_free_s=9.0)
    full = replace(E0, num_running=9)
    picked = Counter(chosen(busy, Q1, full, E1, mode="random", seed=seed) for seed in range(100))
    assert len(picked) == 4
    assert chosen(busy, Q1, full, E1, mode="least-loaded", cached_blocks=cached(6, 0, 0, 0)) == ("q1", "e1")
