"""A decode worker computes a prompt itself where that is quicker and spares the requests that decode there."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from halfmoon.errors import Unavailable
from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.refusal import Refused
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.placement.candidates import ranked_candidates
from halfmoon.policy.placement.conditional import ConditionalMode
from halfmoon.policy.placement.place import PlacementRules, place
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.policy.values import NOTHING_CACHED, Placement, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import Role, WorkerView
from tests.policy.reported_state import ReportedState

PREFILL = PrefillModel(0.0, 1e-3, 0.0)  # 1 ms a token
STEP = StepModel(0.01, 1e-3, 0.0)  # 10 ms, and 1 ms for each sequence
BUSY_S = 0.5  # of the prefill worker's queue


def worker(worker_id: str, role: Role, **changed: Any) -> WorkerView:
    plain = WorkerView(worker_id, role, f"{worker_id}:1", 4096, 16, 256, 256, step_tokens=512, chunk_tokens=128)
    return replace(plain, prefill_model=PREFILL, step_model=STEP, **changed)


P = worker("p", "prefill", prefill_free_s=BUSY_S)
D = worker("d", "decode", holder=0)
CACHED = np.array([5, 0], dtype=np.int64)  # five blocks of 16 tokens on `D`


def placed(
    *workers: WorkerView,
    conditional: ConditionalMode = "auto",
    num_prompt_tokens: int = 100,
    max_tokens: int = 50,
    mode: PlacementMode = "kvcache-centric",
    cached_blocks: np.ndarray[Any, Any] = NOTHING_CACHED,
    tbt_target_s: float = math.inf,
    handover_s: float = 0.0,
    seed: int = 0,
    is_failover: bool = False,
    exclude: tuple[str, ...] = (),
) -> Placement:
    request = PlacementRequest(
        num_prompt_tokens,
        max_tokens,
        exclude,
        tbt_target_s=tbt_target_s,
        cached_blocks=cached_blocks,
        is_failover=is_failover,
    )
    view, rules = ClusterView(workers), PlacementRules(mode, conditional=conditional)
    forecast = ReportedState(view, rules)
    forecast.handover_gap_s = handover_s
    return place(view, request, rules, forecast, 0.0, random.Random(seed))


def test_a_short_prompt_stays_while_prefill_workers_are_busy() -> None:
    placement = placed(P, D)
    assert (placement.prefill.worker_id, placement.decode.worker_id) == ("d", "d")
    assert placement.decode_address == ""
    assert placement.disaggregation == "kept_short"
    assert placement.ttft_s == pytest.approx(0.1)


def test_a_prompt_goes_to_an_idle_prefill_worker() -> None:
    placement = placed(replace(P, prefill_free_s=0.0), D)
    assert (placement.prefill.worker_id, placement.decode.worker_id) == ("p", "d")
    assert placement.disaggregation == "not_faster"


def test_a_cached_prompt_stays() -> None:
    placement = placed(replace(P, prefill_free_s=0.0), D, cached_blocks=CACHED)
    assert placement.disaggregation == "kept_cached"
    assert placement.cached_tokens == 80


def test_a_long_prompt_stays_where_queues_are_longer_than_it_takes() -> None:
    assert placed(P, D, num_prompt_tokens=400).disaggregation == "kept_idle"
    assert placed(P, D, num_prompt_tokens=400, conditional="strict").disaggregation == "not_short"
    assert placed(P, D, num_prompt_tokens=100, conditional="strict").disaggregation == "kept_short"


def test_the_handover_that_is_saved_counts() -> None:
    idle = replace(P, prefill_free_s=0.0)
    assert placed(idle, D, handover_s=0.02).disaggregation == "kept_short"
    assert placed(idle, D, handover_s=0.02, conditional="strict").disaggregation == "not_faster"
    assert placed(idle, D, handover_s=0.02, max_tokens=1).disaggregation == "not_faster"  # there is none to save


def test_chunks_share_steps_with_the_decodes_there() -> None:
    busy = replace(D, num_running=20)  # a step of 30 ms, with each of two chunks
    soon = replace(P, prefill_free_s=0.05)
    assert placed(soon, D, num_prompt_tokens=200).disaggregation == "kept_idle"
    assert placed(soon, busy, num_prompt_tokens=200).disaggregation == "not_faster"


@pytest.mark.parametrize(("target_s", "reason"), [(0.1, "neighbours"), (0.15, "kept_short")])
def test_no_step_takes_longer_than_the_class_allows(target_s: float, reason: str) -> None:
    placement = placed(P, replace(D, num_running=10), tbt_target_s=target_s)
    assert placement.disaggregation == reason  # a step of 20 ms, and a chunk of 100 ms


def test_without_targets_a_step_takes_at_most_four_times_as_long() -> None:
    assert placed(P, replace(D, num_running=10)).disaggregation == "neighbours"  # 120 ms after 20 ms
    assert placed(P, replace(D, num_running=10), num_prompt_tokens=60).disaggregation == "kept_short"


def test_without_targets_others_wait_for_a_failover_as_long_as_it_gains() -> None:
    busy, soon = replace(D, num_running=10), replace(P, prefill_free_s=0.05)
    assert placed(P, busy, is_failover=True).disaggregation == "kept_short"  # 0.1 s of chunk, 0.48 s gained
    assert placed(soon, busy, is_failover=True).disaggregation == "neighbours"  # 0.03 s gained
    assert placed(P, busy, is_failover=True, tbt_target_s=0.1).disaggregation == "neighbours"


def test_a_failover_needs_no_prefill_worker() -> None:
    placement = placed(D, is_failover=True)
    assert (placement.prefill.worker_id, placement.decode.worker_id) == ("d", "d")
    assert placement.disaggregation == "kept_alone"
    cases: list[tuple[WorkerView, ConditionalMode, bool]] = [
        (D, "off", True),
        (D, "auto", False),
        (replace(D, prefill_model=PrefillModel()), "auto", True),
    ]
    for worker, conditional, is_failover in cases:
        with pytest.raises(Unavailable, match="no prefill worker"):
            placed(worker, conditional=conditional, is_failover=is_failover)


def test_a_failover_goes_alone_where_the_prefill_worker_left_is_excluded() -> None:
    """It may be dying, and is still in view for some seconds."""
    other = worker("other", "decode")
    placement = placed(P, D, other, is_failover=True, exclude=("p", "d"))
    assert (placement.prefill.worker_id, placement.disaggregation) == ("other", "kept_alone")
    for workers, is_failover in (((P, D, other), False), ((P, D), True)):
        with pytest.raises(Unavailable, match="refused it"):
            placed(*workers, is_failover=is_failover, exclude=("p", "d"))


def test_prompts_that_wait_there_fill_the_chunk() -> None:
    waiting = replace(D, num_running=10, waiting_prefill_tokens=60)
    assert placed(P, waiting, num_prompt_tokens=60).disaggregation == "neighbours"


def test_a_worker_that_keeps_its_pace_is_found_behind_one_that_would_not() -> None:
    full, other = replace(D, num_running=10), worker("other", "decode", prefill_free_s=0.1)
    placement = placed(P, full, other)
    assert (placement.prefill.worker_id, placement.disaggregation) == ("other", "kept_short")


def test_a_nearly_full_worker_gets_no_prompt() -> None:
    assert placed(P, replace(D, free_blocks=31)).disaggregation == "no_room"  # with it less than a tenth is free
    assert placed(P, replace(D, free_blocks=32)).disaggregation == "kept_short"
    for num_placed, reason in ((18, "no_room"), (17, "kept_short")):
        assert (
            placed(P, replace(D, num_placed=num_placed, max_running=20), num_prompt_tokens=20).disaggregation == reason
        )


def test_unknown_speed_keeps_nothing() -> None:
    assert placed(P, replace(D, prefill_model=PrefillModel())).disaggregation == "unknown"
    assert placed(P, replace(D, chunk_tokens=0)).disaggregation == "unknown"


def test_off_keeps_nothing() -> None:
    assert placed(P, D, conditional="off").disaggregation == "off"


@pytest.mark.parametrize("mode", ["least-loaded", "random"])
def test_modes_without_predictions_apply_the_rule_to_the_decode_worker_they_chose(mode: PlacementMode) -> None:
    others = [worker(f"d{number}", "decode") for number in range(3)]
    slow = [replace(one, prefill_free_s=2 * BUSY_S) for one in others]
    kept = [placed(P, D, *others, mode=mode, seed=seed) for seed in range(20)]
    assert {placement.disaggregation for placement in kept} == {"kept_short"}
    assert all(placement.prefill is placement.decode for placement in kept)
    assert len({placement.decode.worker_id for placement in kept}) == 4
    mixed = [placed(P, D, *slow, mode=mode, seed=seed) for seed in range(20)]
    assert {(one.decode.worker_id == "d", one.disaggregation) for one in mixed} == {
        (True, "kept_short"),
        (False, "not_faster"),
    }
    assert placed(D, mode=mode, is_failover=True).disaggregation == "kept_alone"
    assert placed(P, D, mode=mode, conditional="off").disaggregation == "off"


@pytest.mark.parametrize("conditional", ["failover", "auto", "strict"])
def test_failovers_follow_the_rules_of_auto(conditional: ConditionalMode) -> None:
    long = placed(P, D, num_prompt_tokens=400, conditional=conditional, is_failover=True)
    assert long.disaggregation == "kept_idle"
    idle = replace(P, prefill_free_s=0.0)
    assert placed(idle, D, conditional=conditional, is_failover=True).disaggregation == "not_faster"
    assert placed(P, D, conditional="off", is_failover=True).disaggregation == "off"
    assert placed(P, D, conditional="failover").disaggregation == "off"


def test_a_prompt_that_the_pool_has_is_loaded_there() -> None:
    """The prefill worker has it, and others wait there."""
    holder, loading = replace(P, holder=0), replace(D, holder=1, fetch_s_per_token=1e-5)
    cached = np.array([5, 0, 0], dtype=np.int64)
    placement = placed(holder, loading, cached_blocks=cached, conditional="failover", is_failover=True)
    assert (placement.disaggregation, placement.fetched_tokens, placement.source) == ("kept_loaded", 80, 0)
    alone = replace(loading, fetch_s_per_token=math.inf)  # it loads nothing
    placement = placed(holder, alone, cached_blocks=cached, conditional="failover", is_failover=True)
    assert (placement.disaggregation, placement.fetched_tokens) == ("kept_short", 0)


def test_a_worker_of_both_roles_leaves_nothing_to_choose() -> None:
    assert placed(worker("b", "both"), D, replace(P, prefill_free_s=9.0)).disaggregation is None


def test_equal_decode_workers_share_the_prompts() -> None:
    others = [worker(f"d{number}", "decode") for number in range(4)]
    assert len({placed(P, *others, seed=seed).prefill.worker_id for seed in range(40)}) == 4


def test_the_decode_worker_is_among_the_candidates() -> None:
    placement = placed(P, D)
    assert placement.ranked_by is not None
    shown = ranked_candidates(ClusterView([P, D]), 100, placement.ranked_by, 6, placement)
    assert [candidate.worker_id for candidate in shown] == ["d", "p"]


class _Controller:
    """Admits requests of 100 tokens of prompt to one prefill and one decode worker."""

    def __init__(self, conditional: ConditionalMode = "auto") -> None:
        rules = PlacementRules(conditional=conditional)
        self.gate = AdmissionController("predicted", rules, random.Random(0))
        self.view = ClusterView([P, D])

    def admit(self, name: str, qos: QosClass, now_s: float = 0.0, num_tokens: int = 100) -> Placement:
        admitted = self.gate.decide(self.view, PlacementRequest(num_tokens, 50), qos, now_s)
        self.gate.inside.enter(name, self.view, admitted, num_tokens, now_s)
        return admitted.placement


def test_the_targets_of_those_who_decode_there_count() -> None:
    for target_s, reason in ((0.1, "neighbours"), (0.2, "kept_short")):
        controller = _Controller()
        assert controller.admit("first", QosClass("tight", tbt_s=target_s)).disaggregation == "kept_short"
        controller.gate.inside.begin_decode("first", 0.1)
        assert controller.admit("second", QosClass("loose", tbt_s=1.0), 0.1).disaggregation == reason


def test_prompts_take_a_share_of_the_time_at_most() -> None:
    controller, loose = _Controller(), QosClass("loose", tbt_s=1.0)
    controller.admit("first", loose)
    controller.gate.inside.begin_decode("first", 0.1)  # decodes for a bit more than half a second
    assert controller.admit("second", loose, 0.1, num_tokens=120).disaggregation == "kept_short"
    assert controller.admit("third", loose, 0.1, num_tokens=120).disaggregation == "neighbours"


def test_early_rejection_knows_that_a_decode_worker_may_compute() -> None:
    hurried = QosClass("hurried", ttft_s=0.2)
    auto = _Controller()
    auto.gate.reject_early(auto.view, 0, has_gaps=True, qos=hurried, now_s=0.0)
    off = _Controller("off")
    with pytest.raises(Refused):
        off.gate.reject_early(off.view, 0, has_gaps=True, qos=hurried, now_s=0.0)
