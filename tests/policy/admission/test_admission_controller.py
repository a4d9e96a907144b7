"""Admission: who is refused, why, with what advice, and what a class gives up before."""

from __future__ import annotations

import random
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest

from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.degradation import Admitted
from halfmoon.policy.admission.qos_classes import ClassTable, QosClass
from halfmoon.policy.admission.refusal import AdmissionMode, Refused
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.placement.place import PlacementRules
from halfmoon.policy.values import AdmissionTargets, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView

PREFILL, STEP = PrefillModel(0.0, 1e-2, 0.0), StepModel(0.0, 1e-2, 0.0)  # 100 tokens a second; 10 ms a sequence
REQUEST = PlacementRequest(100, 200)
P = WorkerView("p", "prefill", "p:1", 1000, 10, 100, 100, prefill_model=PREFILL)
D = WorkerView("d", "decode", "d:1", 1000, 10, 100, 100, step_model=STEP)


def keeper(mode: AdmissionMode = "predicted", *classes: QosClass) -> AdmissionController:
    made = AdmissionController(mode, PlacementRules(), random.Random(0))
    made.classes = ClassTable(classes)
    return made


def enter(gate: AdmissionController, view: ClusterView, name: str, qos: QosClass, now_s: float = 0.0) -> Admitted:
    admitted = gate.decide(view, REQUEST, qos, now_s)
    gate.inside.enter(name, view, admitted, REQUEST.num_prompt_tokens, now_s)
    return admitted


def leave(gate: AdmissionController, name: str, num_output: int = 50) -> None:
    gate.leave(name, 9.0, num_output=num_output, ttft_s=1.0, tbt_s=0.01)


def test_no_targets_no_refusals() -> None:
    gate, view = keeper(), ClusterView((replace(P, prefill_free_s=1e6), D))
    assert gate.decide(view, REQUEST, QosClass("x"), 0.0).placement.ttft_s == pytest.approx(1e6 + 1)


@pytest.mark.parametrize("mode", ["load", "predicted"])
def test_a_queue_too_long_for_the_class(mode: AdmissionMode) -> None:
    gate, view = keeper(mode), ClusterView((replace(P, prefill_free_s=10.0), D))
    with pytest.raises(Refused, match=r"first token would be 11 s, class x allows 2 s") as caught:
        gate.decide(view, REQUEST, QosClass("x", ttft_s=2.0), 0.0)
    refusal = caught.value
    assert (refusal.reason, refusal.ttft_s, refusal.retry_after_ms) == ("ttft", 11.0, 9000)
    assert gate.decide(view, REQUEST, QosClass("x", ttft_s=2.0), 9.1).qos.name == "x"  # as advised
    assert keeper("off").decide(view, REQUEST, QosClass("x", ttft_s=2.0), 0.0).placement.ttft_s == 11.0


def test_a_prompt_too_long_for_the_class_gains_nothing_by_coming_back() -> None:
    gate, view = keeper(), ClusterView((P, D))
    with pytest.raises(Refused) as caught:
        gate.decide(view, REQUEST, QosClass("x", ttft_s=0.5), 0.0)
    assert caught.value.retry_after_ms == 60_000
    with pytest.raises(Refused, match="time between tokens would be 10 ms, class x allows 5 ms") as caught:
        gate.decide(view, REQUEST, QosClass("x", tbt_s=0.005), 0.0)
    assert caught.value.retry_after_ms == 60_000


@pytest.mark.parametrize(("queue_s", "is_refused"), [(0.0, False), (0.4, False), (0.6, True)])
def test_where_only_overload_is_refused_a_request_waits_no_longer_than_its_target(
    queue_s: float, is_refused: bool
) -> None:
    slow = QosClass("slow", ttft_s=0.5, tbt_s=0.005, early_rejection="overload")  # by itself it takes 1 s, and 10 ms
    gate, view = keeper(), ClusterView((replace(P, prefill_free_s=queue_s), D))
    for judge in (
        lambda: gate.reject_early(view, 0, has_gaps=True, qos=slow, now_s=0.0),
        lambda: gate.decide(view, REQUEST, slow, 0.0),
    ):
        with pytest.raises(Refused) if is_refused else nullcontext() as caught:
            judge()
        assert not is_refused or (caught is not None and caught.value.reason == "ttft" and caught.value.is_by_others)


def test_where_only_overload_is_refused_targets_that_an_idle_cluster_meets_are_kept() -> None:
    fair = QosClass("fair", ttft_s=2.0, tbt_s=0.015, early_rejection="overload")
    gate, view = keeper(), ClusterView((P, replace(D, prefill_model=PREFILL)))
    enter(gate, view, "first", fair)
    with pytest.raises(Refused, match="time between tokens") as caught:
        gate.decide(view, REQUEST, fair, 0.0)
    assert caught.value.is_by_others


def test_a_refusal_tells_the_classs_own_target_and_why_another_one_is_applied() -> None:
    gate, view, gold = keeper(), ClusterView((P, D)), QosClass("gold", ttft_s=2.0)
    for number in range(30):
        gate.inside.enter(str(number), view, gate.decide(view, REQUEST, gold, 0.0), 100, 0.0)
        gate.leave(str(number), 0.0, num_output=1, ttft_s=2.4, tbt_s=None)
    assert gate.applied(gold) == AdmissionTargets(2.0, None)  # nobody has asked since
    told = "would be 1.85 s, class gold allows 2 s; now 1.8 s, because 90 % of its latest requests took up to 2.4 s"
    view.put(replace(P, prefill_free_s=1.85))
    with pytest.raises(Refused, match=told) as caught:
        gate.decide(view, REQUEST, gold, 1.0)
    assert (caught.value.targets, caught.value.applied) == (AdmissionTargets(2.0, None), AdmissionTargets(1.8, None))
    assert gate.applied(gold) == AdmissionTargets(1.8, None)
    assert gate.applied(replace(gold, ttft_s=3.0)) == AdmissionTargets(3.0, None)  # an edit begins anew


@pytest.mark.parametrize("mode", ["load", "predicted"])
def test_one_token_misses_no_tbt(mode: AdmissionMode) -> None:
    gate, view, strict = keeper(mode), ClusterView((P, D)), QosClass("x", tbt_s=0.001)
    with pytest.raises(Refused, match="time between tokens"):
        gate.decide(view, REQUEST, strict, 0.0)
    assert gate.decide(view, replace(REQUEST, max_tokens=1), strict, 0.0).max_tokens == 1


def test_load_does_not_see_who_is_still_in_prefill_predicted_does() -> None:
    strict = QosClass("x", tbt_s=0.025)
    view = ClusterView((P, D))
    modes: tuple[tuple[AdmissionMode, int], ...] = (("load", 9), ("predicted", 2))
    for mode, most in modes:
        gate = keeper(mode)
        admitted = 0
        for number in range(9):
            with suppress(Refused):
                enter(gate, view, f"r{number}", strict)
                admitted += 1
        assert admitted == most


@pytest.mark.parametrize("mode", ["load", "predicted"])
def test_a_busy_neighbour_counts(mode: AdmissionMode) -> None:
    """Twice as long a step beside the prefill worker of its host, which is busy half of the time."""
    gate, qos = keeper(mode), QosClass("x", tbt_s=0.014)
    view = ClusterView((P, replace(D, address="p:2", step_contention=1.0)))
    assert gate.decide(view, REQUEST, qos, 0.0).qos is qos
    for number in range(100):
        view.busy.begin("p", str(number), 2.0 * number)
        view.busy.end("p", str(number), 2.0 * number + 1)
    with pytest.raises(Refused, match="time between tokens would be 15 ms"):
        gate.decide(view, REQUEST, qos, 200.0)


def test_predicted_does_not_mind_who_will_have_left_load_does() -> None:
    strict, loose = QosClass("x", tbt_s=0.025), QosClass("y")
    view = ClusterView((P, D))
    for mode in ("load", "predicted"):
        gate = keeper("load" if mode == "load" else "predicted")
        for _ in range(10):
            gate.lengths.add("y", 100, 10)  # so short that they are gone when a prefill of one second ends
        for number in range(4):
            enter(gate, view, f"r{number}", loose)
            gate.inside.begin_decode(f"r{number}", 1.0)
        if mode == "load":
            with pytest.raises(Refused, match="between tokens would be 50 ms, class x allows 25 ms") as caught:
                gate.decide(view, REQUEST, strict, 1.0)
            assert caught.value.retry_after_ms == 1000
        else:
            assert gate.decide(view, REQUEST, strict, 1.0).placement.tbt_s == pytest.approx(0.01)


def test_who_does_both_is_chosen_by_both_targets_of_the_class() -> None:
    quick = WorkerView(
        "quick", "both", "a:1", 1000, 10, 100, 100, prefill_model=P.prefill_model, step_model=D.step_model
    )
    crowded = replace(quick, num_running=3)
    later = replace(quick, worker_id="later", address="b:1", prefill_free_s=0.5)
    view, alone_s = ClusterView((crowded, later)), D.step_model.seconds(1, REQUEST.num_prompt_tokens)
    gate = keeper()
    gate._forecast.decodes.join("other", 0, 0.0, 100.0, 100, 100)
    chosen = {
        tbt_s: gate.decide(view, REQUEST, QosClass("x", tbt_s=tbt_s), 0.0).placement.decode.worker_id
        for tbt_s in (None, 1.5 * alone_s)
    }
    assert chosen == {None: "quick", 1.5 * alone_s: "later"}
    one = replace(REQUEST, max_tokens=1)
    assert gate.decide(view, one, QosClass("x", tbt_s=1.5 * alone_s), 0.0).placement.decode.worker_id == "quick"


def test_output_lengths_are_learned_from_what_ended() -> None:
    gate, view = keeper(), ClusterView((P, D))
    for number in range(10):
        assert enter(gate, view, f"r{number}", QosClass("x")).num_output == (200 if number < 8 else 50)
        leave(gate, f"r{number}")
    enter(gate, view, "cancelled", QosClass("x"))
    gate.leave("cancelled", 1.0, num_output=1, ttft_s=None, tbt_s=None)
    assert gate.decide(view, REQUEST, QosClass("x"), 0.0).num_output == 50


def test_things_are_given_up_in_the_classs_order() -> None:
    gold, view = QosClass("gold", 0, 0.5), ClusterView((P, D))  # 1000 tokens of KV memory
    for steps, given_up in (
        (("cap_max_tokens",), (16, False)),
        (("lower_kv_precision", "cap_max_tokens"), (16, True)),
        (("cap_max_tokens", "lower_kv_precision"), (16, False)),
    ):
        cheap = QosClass("cheap", 1, degradation=steps, capped_tokens=16)  # type: ignore[arg-type]
        gate = keeper("predicted", gold, cheap)
        assert enter(gate, view, "a", gold).max_tokens == 200
        assert gate.decide(view, REQUEST, cheap, 0.0).max_tokens == 200
        enter(gate, view, "b", cheap)
        found = gate.decide(view, replace(REQUEST, num_prompt_tokens=250), cheap, 0.0)  # 600 of 1000 are used
        assert (found.max_tokens, found.lower_kv_precision) != (200, False)
        assert (found.max_tokens, found.lower_kv_precision) == given_up


def test_a_share_that_is_used_up() -> None:
    gold, other = QosClass("gold", 0, 0.3), QosClass("x")
    gate, view = keeper("predicted", gold, other), ClusterView((P, D))
    for number in range(5):  # nobody keeps anything free
        enter(gate, view, f"r{number}", other)
    enter(gate, view, "gold", gold)
    with pytest.raises(Refused) as caught:
        enter(gate, view, "r5", other)
    assert caught.value.reason == "reservation"
    for number in range(4):
        leave(gate, f"r{number}")
    enter(gate, view, "r6", other)


def test_lower_classes_wait_while_one_above_cannot_be_served() -> None:
    gold = QosClass("gold", 0, ttft_s=2.0, degradation=("shed_lowest_class",))
    low, lower = QosClass("low", 5), QosClass("lower", 9)
    gate, view = keeper("predicted", gold, low, lower), ClusterView((replace(P, prefill_free_s=10.0), D))
    gate.decide(view, REQUEST, lower, 0.0)
    with pytest.raises(Refused):
        gate.decide(view, REQUEST, gold, 0.0)
    with pytest.raises(Refused) as caught:
        gate.decide(view, REQUEST, lower, 1.0)
    assert (caught.value.reason, caught.value.retry_after_ms) == ("shed", 4000)
    gate.decide(view, REQUEST, low, 1.0)  # only the lowest, as long as that may be enough
    with pytest.raises(Refused, match="first token"):
        gate.decide(view, REQUEST, gold, 2.0)
    with pytest.raises(Refused, match="waits while"):
        gate.decide(view, REQUEST, low, 2.0)
    gate.decide(view, REQUEST, low, 7.0)
    gate.decide(view, REQUEST, lower, 7.0)


@pytest.mark.parametrize("impossible", [QosClass("gold", ttft_s=0.5), QosClass("gold", tbt_s=0.005)])
def test_nobody_is_shed_for_a_class_that_can_never_be_served(impossible: QosClass) -> None:
    """An empty cluster misses its targets, too."""
    gold, low = replace(impossible, degradation=("shed_lowest_class",)), QosClass("low", 5)
    gate, view = keeper("predicted", gold, low), ClusterView((P, D))
    with pytest.raises(Refused):
        gate.decide(view, REQUEST, gold, 0.0)
    assert gate.decide(view, REQUEST, low, 1.0).qos is low


def test_who_would_be_late_by_prompts_in_the_same_step_may_come_back_soon_and_sheds_them() -> None:
    """They are no part of what it takes alone, though it would begin with them."""
    gold, low = QosClass("gold", -1, ttft_s=2.0, degradation=("shed_lowest_class",)), QosClass("low", 5)
    gate, view = keeper("predicted", gold, low), ClusterView((replace(P, step_tokens=1000), D))
    for name in "abcd":
        enter(gate, view, name, low)
    with pytest.raises(Refused) as caught:
        gate.decide(view, replace(REQUEST, num_prompt_tokens=1, priority=-1), gold, 0.1)
    assert caught.value.ttft_s == pytest.approx(0.9 + 3.01)
    assert caught.value.retry_after_ms == pytest.approx(1000 * (0.9 + 3.01 - 2.0), abs=1)
    with pytest.raises(Refused) as caught:
        gate.decide(view, REQUEST, low, 0.2)
    assert caught.value.reason == "shed"


def test_a_request_that_moved_counts_where_it_is() -> None:
    other, qos = replace(D, worker_id="d2"), QosClass("x")
    gate, view = keeper(), ClusterView((P, D, other))
    first = enter(gate, view, "a", qos)
    assert gate.place_again(view, REQUEST, qos, 0.0).decode.worker_id != first.placement.decode.worker_id
    there = gate.place_again(view, replace(REQUEST, exclude=(first.placement.decode.worker_id,)), qos, 0.0)
    gate.inside.move("a", view, there, 0.0)
    assert gate.place_again(view, REQUEST, qos, 0.0).decode.worker_id == first.placement.decode.worker_id


def test_who_is_placed_again_goes_where_its_class_is_served_in_time() -> None:
    slower = replace(D, worker_id="d2", step_model=StepModel(*(1.12 * one for one in STEP)))
    view, tbt_s = ClusterView((P, D, slower)), STEP.seconds(1, 100)
    for qos, found in ((QosClass("x"), {"d", "d2"}), (QosClass("x", tbt_s=1.05 * tbt_s), {"d"})):
        gate = keeper()
        again = {gate.place_again(view, REQUEST, qos, 0.0).decode.worker_id for _ in range(100)}
        assert again == found


@pytest.mark.parametrize("num_output", [3, 100])
def test_what_short_answers_owe_to_the_hand_over_refuses_nobody(num_output: int) -> None:
    qos, view = QosClass("x", tbt_s=0.05), ClusterView((P, D))
    gate = keeper("predicted", qos)
    for number in range(30):
        enter(gate, view, f"r{number}", QosClass("x"))
        gate.leave(f"r{number}", 0.0, num_output=num_output, ttft_s=1.0, tbt_s=None)
        enter(gate, view, f"r{number}", qos)
        gate.leave(f"r{number}", 1.0, num_output=num_output, ttft_s=1.0, tbt_s=0.2)
    gate.decide(view, REQUEST, qos, 2.0)
    assert bool(gate.tightenings(qos)) == (num_output == 100)


@pytest.mark.parametrize(("ttft_s", "is_tightened"), [(0.9, False), (0.97, True)])
def test_admission_gets_stricter_before_a_target_is_missed(ttft_s: float, is_tightened: bool) -> None:
    qos, view = QosClass("x", ttft_s=2.0), ClusterView((P, D))
    gate = keeper("predicted", qos)
    for number in range(30):
        enter(gate, view, f"r{number}", qos)
        gate.leave(f"r{number}", 1.0, num_output=2, ttft_s=2 * ttft_s, tbt_s=None)
    gate.decide(view, replace(REQUEST, num_prompt_tokens=1), qos, 2.0)
    assert bool(gate.tightenings(qos)) == is_tightened


@pytest.mark.parametrize("mode", ["load", "predicted"])
@pytest.mark.parametrize("promised", [{"ttft_s": 1.2}, {"tbt_s": 0.012}])
def test_an_idle_cluster_serves_however_late_others_were(mode: AdmissionMode, promised: dict[str, float]) -> None:
    """A prompt takes a second alone, a step 10 ms: half of either target is less."""
    qos, view = QosClass("x", **promised), ClusterView((P, D))  # type: ignore[arg-type]
    gate = keeper(mode, qos)
    for minute in range(12):
        for number in range(30):
            enter(gate, view, f"r{number}", qos, 60.0 * minute)
            gate.leave(f"r{number}", 60.0 * minute + 3, num_output=200, ttft_s=9.0, tbt_s=0.1)
        gate.decide(view, REQUEST, qos, 60.0 * minute + 4)
    assert gate.tightenings(qos)


def test_most_answers_are_shorter_than_predicted() -> None:
    gate, view = keeper(), ClusterView((P, D))
    for length in range(100):
        gate.lengths.add("x", REQUEST.num_prompt_tokens, length)
    assert gate.decide(view, REQUEST, QosClass("x"), 0.0).num_output == pytest.approx(0.8 * 99)


def test_an_idle_cluster_that_refuses_everybody_lets_one_in_to_see() -> None:
    strict, slow = QosClass("x", ttft_s=0.1), ClusterView((P, D))  # a wrong profile, which nobody would correct
    gate = keeper("predicted", strict)
    for now_s in (5.0, 9.0, 14.9):
        with pytest.raises(Refused):
            gate.decide(slow, REQUEST, strict, now_s)
    enter(gate, slow, "probe", strict, 15.0)
    for now_s in (15.0, 40.0):
        with pytest.raises(Refused):
            gate.decide(slow, REQUEST, strict, now_s)  # the probe runs
    leave(gate, "probe")
    for now_s in (41.0, 50.9):
        with pytest.raises(Refused):
            gate.decide(slow, REQUEST, strict, now_s)
    gate.decide(slow, REQUEST, strict, 51.0)


def test_a_first_class_prompt_does_not_wait_for_those_behind_it() -> None:
    lead, rest = QosClass("lead", -1, ttft_s=1.5), QosClass("rest", 1, ttft_s=1.5)
    gate, view = keeper("predicted", lead, rest), ClusterView((P, D))
    crowd = replace(REQUEST, priority=1_000)
    for number in range(5):
        admitted = gate.decide(view, crowd, QosClass("patient", 1), 0.0)
        gate.inside.enter(f"r{number}", view, admitted, crowd.num_prompt_tokens, 0.0)
    with pytest.raises(Refused, match="would be 6 s"):
        gate.decide(view, crowd, rest, 0.0)
    assert gate.decide(view, replace(REQUEST, priority=-1_000), lead, 0.0).placement.ttft_s <= 1.5


def test_what_lies_between_workers_is_learned_and_counts() -> None:
    gate, view = keeper(), ClusterView((P, D))
    plain = gate.decide(view, REQUEST, QosClass("x"), 0.0).placement
    for _ in range(8):
        gate.note_overheads(0.25, 2.0)
    later = gate.decide(view, REQUEST, QosClass("x"), 0.0).placement
    assert later.ttft_s == pytest.approx(plain.ttft_s + 0.25)
    assert later.tbt_s == pytest.approx(plain.tbt_s + 2.0 / (REQUEST.max_tokens - 1))
    assert (later.prefill_s, later.queue_s) == (plain.prefill_s, 0.0)


def test_a_far_end_of_prefill_is_no_way_around_the_decode_load() -> None:
    strict, loose = QosClass("x", tbt_s=0.025), QosClass("y")
    view = ClusterView((P, D))
    long = replace(REQUEST, num_prompt_tokens=700)  # a prefill of seven seconds: by then all that run have left
    gate = keeper("predicted")
    for _ in range(10):
        gate.lengths.add("y", 100, 100)
    for number in range(4):
        enter(gate, view, f"r{number}", loose)
        gate.inside.begin_decode(f"r{number}", 0.0)
    with pytest.raises(Refused, match="time between tokens"):
        gate.decide(view, long, strict, 0.0)
    for _ in range(300):  # until such prompts are the usual ones
        gate.decide(view, long, loose, 0.0)
    assert gate.decide(view, long, strict, 0.0).qos is strict
