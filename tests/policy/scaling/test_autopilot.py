"""The autopilot: what it changes, what holds it back, and that it leaves persons' changes alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.scaling.autopilot import Advice, Autopilot, Decision
from halfmoon.policy.scaling.observation import Observation, ObservedWorker, Split, Traffic, WorkerSpeed
from halfmoon.policy.scaling.pressure import Capacity, Demand
from halfmoon.policy.scaling.rules import ScalingRules
from halfmoon.policy.view.worker_view import ROLES

SPEED = WorkerSpeed(PrefillModel(0.02, 4e-4, 0.0), StepModel(0.06, 1.5e-3, 2e-7), 64, 200_000)
RULES = ScalingRules(dwell_s=30.0, settle_s=20.0, between_s=1.0, patience_s=10.0, person_s=900.0)
TTFT_S, TPOT_S = 4.0, 0.1


def seen(split: Split, work_per_s: float, running: int) -> Observation:
    """A cluster with prompts of 1 s that bring `work_per_s`, and `running` sequences a decode worker."""
    workers = tuple(
        ObservedWorker(f"{role}-{number}", role, num_running=0 if role == "prefill" else running,
                       context_tokens=0.0 if role == "prefill" else 500.0 * running)
        for role in ROLES
        for number in range(split.of(role))
    )  # fmt: skip
    traffic = Traffic(10.0, round(10 * work_per_s), 10 * work_per_s, 100, 100, 100)
    return Observation(workers, traffic, SPEED, TTFT_S, TPOT_S)


def applied(observation: Observation, decision: Decision, now_s: float) -> Observation:
    """The cluster after a change of a role."""
    assert decision.role is not None
    workers = tuple(
        replace(worker, role=decision.role, epoch=worker.epoch + 1, changed_s=now_s, num_running=0, context_tokens=0.0)
        if worker.worker_id == decision.worker_id
        else worker
        for worker in observation.workers
    )
    return replace(observation, workers=workers)


def test_a_pressed_phase_gets_a_worker() -> None:
    decision = Autopilot(RULES).decide(seen(Split(4, 12), 5.0, 5), 0.0)
    assert (decision.action, decision.role, decision.worker_id[:6]) == ("change_role", "prefill", "decode")
    assert decision.predicted.most < decision.pressure.most
    decision = Autopilot(RULES).decide(seen(Split(12, 4), 1.0, 30), 0.0)
    assert (decision.action, decision.role) == ("change_role", "decode")


def test_colocated_workers_stay_as_they_are() -> None:
    observation = seen(Split(0, 0, 16), 14.0, 40)
    assert not any(Autopilot(RULES).decide(observation, float(now_s)).changes for now_s in range(30))


def test_nothing_changes_where_nothing_is_pressed() -> None:
    assert Autopilot(RULES).decide(seen(Split(8, 8), 4.0, 10), 0.0).action == "hold"


def test_one_change_at_a_time() -> None:
    autopilot, observation = Autopilot(RULES), seen(Split(4, 12), 6.0, 5)
    first = autopilot.decide(observation, 0.0)
    assert autopilot.decide(observation, 5.0).reason == "a change is under way"
    after = applied(observation, first, 5.0)
    assert autopilot.decide(after, 5.5).changes


def test_changes_are_apart_and_a_lost_one_is_given_up() -> None:
    autopilot, observation = Autopilot(RULES), seen(Split(4, 12), 6.0, 5)
    first = autopilot.decide(observation, 0.0)
    assert autopilot.decide(applied(observation, first, 0.1), 0.2).reason == "the last change was a moment ago"
    autopilot = Autopilot(RULES)
    assert autopilot.decide(observation, 0.0).changes
    assert autopilot.decide(observation, RULES.confirm_s + 1).changes


def test_a_worker_keeps_its_role_for_the_dwell_time() -> None:
    observation = seen(Split(4, 12), 6.0, 5)
    recent = replace(observation, workers=tuple(replace(each, changed_s=90.0) for each in observation.workers))
    assert not Autopilot(RULES).decide(recent, 100.0).changes
    assert Autopilot(RULES).decide(recent, 121.0).changes


def test_a_change_is_not_taken_back_for_a_little_gain() -> None:
    def after_a_change() -> tuple[Autopilot, Observation]:
        autopilot, observation = Autopilot(replace(RULES, dwell_s=0.0, settle_s=100.0)), seen(Split(8, 8), 8.0, 5)
        return autopilot, applied(observation, autopilot.decide(observation, 0.0), 0.1)

    def turned(observation: Observation, num_prompts: int) -> Observation:
        workers = tuple(
            replace(each, num_running=25 * (each.role == "decode"), context_tokens=500.0 * 25)
            for each in observation.workers
        )
        return replace(observation, workers=workers, traffic=Traffic(10.0, num_prompts, num_prompts, 100, 100, 100))

    autopilot, observation = after_a_change()
    assert autopilot.decide(turned(observation, 65), 20.0).reason == "the last change is not taken back yet"
    assert autopilot.decide(turned(observation, 65), 101.0).role == "decode"
    autopilot, observation = after_a_change()
    other_traffic = autopilot.decide(turned(observation, 10), 20.0)
    assert other_traffic.role == "decode", "many changes are due, each of which gains little"
    assert other_traffic.pressure.most - other_traffic.predicted.most < 3 * RULES.gain


def test_a_full_phase_keeps_its_workers_while_requests_meet_their_targets() -> None:
    observation = seen(Split(9, 7), 1.0, 22)
    assert RULES.pressed < Autopilot(RULES).decide(observation, 0.0).pressure.decode < 1
    assert not Autopilot(RULES).decide(observation, 0.0).changes
    late = replace(observation, traffic=observation.traffic._replace(num_in_tpot=89))
    assert Autopilot(RULES).decide(late, 0.0).role == "decode"


def test_what_a_person_changed_is_left_alone() -> None:
    autopilot, observation = Autopilot(RULES), seen(Split(8, 8), 1.0, 10)
    autopilot.decide(observation, 0.0)
    by_hand = tuple(
        replace(each, role="prefill", epoch=1, changed_s=1.0) if each.role == "decode" else each
        for each in observation.workers
        if each.worker_id != "decode-7"
    )
    last = next(each for each in observation.workers if each.worker_id == "decode-7")
    pressed = replace(observation, workers=(*by_hand, replace(last, num_running=60, context_tokens=30_000.0)))
    decision = autopilot.decide(pressed, 60.0)
    assert decision.action == "change_role"
    assert decision.worker_id.startswith("prefill"), "the workers that the person changed stay"
    only = replace(
        pressed, workers=tuple(each for each in pressed.workers if each.epoch or each is pressed.workers[-1])
    )
    other = Autopilot(RULES)
    other.decide(replace(only, workers=tuple(replace(each, epoch=0) for each in only.workers)), 0.0)
    assert not other.decide(only, 60.0).changes
    assert other.decide(only, 60.0 + RULES.person_s).changes


def test_a_change_before_it_began_is_a_persons_for_as_long_as_it_is_recent() -> None:
    observation = seen(Split(1, 3), 2.0, 1)
    changed = replace(
        observation, workers=tuple(replace(each, epoch=1, changed_s=100.0) for each in observation.workers)
    )
    autopilot = Autopilot(RULES)
    assert not autopilot.decide(changed, 200.0).changes
    assert autopilot.decide(changed, 100.0 + RULES.person_s).changes


@pytest.mark.parametrize("changes_per_hour", [0, 1])
def test_a_spent_budget_comes_back_evenly(changes_per_hour: int) -> None:
    """One of 16 workers once an hour: 16 changes at once, and then one every 225 s."""
    rules = replace(RULES, changes_per_hour=changes_per_hour)
    autopilot, observation = Autopilot(rules), seen(Split(8, 8), 0.0, 0)
    times = []
    for now_s in range(0, 3600, 5):
        work_per_s, running = ((9.0, 2), (0.5, 45))[now_s // 20 % 2]  # traffic that turns round every 20 s
        workers = tuple(
            replace(each, num_running=running, context_tokens=500.0 * running) if each.role == "decode" else each
            for each in observation.workers
        )
        traffic = observation.traffic._replace(num_requests=round(10 * work_per_s), work_s=10 * work_per_s)
        observation = replace(observation, workers=workers, traffic=traffic._replace(num_in_ttft=50, num_in_tpot=50))
        decision = autopilot.decide(observation, float(now_s))
        if decision.changes:
            times.append(now_s)
            observation = applied(observation, decision, float(now_s))
    assert [time_s // 225 for time_s in times] == changes_per_hour * [*16 * [0], *range(1, 16)]
    assert "spent" in Autopilot(replace(RULES, changes_per_hour=0)).decide(seen(Split(2, 14), 6.0, 3), 0.0).reason


def test_it_says_that_the_targets_cannot_be_met_and_what_would() -> None:
    autopilot, observation = Autopilot(RULES), seen(Split(8, 8), 9.6, 40)
    kinds = [autopilot.decide(observation, float(now_s)).action for now_s in range(20)]
    assert kinds[-1] == "cannot_be_met"
    last = autopilot.decide(observation, 21.0)
    assert last.num_needed > 16
    assert not last.changes


def test_it_starts_workers_up_to_its_bound_and_stops_idle_ones() -> None:
    rules = replace(RULES, max_workers=17, min_workers=15)
    autopilot, observation = Autopilot(rules), seen(Split(8, 8), 9.6, 40)
    decisions = [autopilot.decide(observation, float(now_s)) for now_s in range(15)]
    assert sum(decision.action == "add_worker" for decision in decisions) == 1
    late = [autopilot.decide(observation, float(now_s)) for now_s in range(15, 15 + int(rules.start_s) + 30)]
    assert sum(decision.action == "add_worker" for decision in late) == 1  # the first one was given up
    full = Autopilot(rules)
    observation = seen(Split(9, 8), 11.0, 41)
    assert [full.decide(observation, float(now_s)).action for now_s in range(15)][-1] == "cannot_be_met"
    idle, observation = Autopilot(rules), seen(Split(8, 8), 0.5, 1)
    decisions = [idle.decide(observation, float(now_s)) for now_s in range(0, 400, 5)]
    assert next(decision for decision in decisions if decision.changes).action == "remove_worker"
    fewest = seen(Split(8, 7), 0.5, 1)
    assert not any(Autopilot(rules).decide(fewest, float(now_s)).changes for now_s in range(0, 400, 5))


def test_a_decision_can_be_taken_back() -> None:
    autopilot, observation = Autopilot(replace(RULES, changes_per_hour=1)), seen(Split(4, 12), 6.0, 5)
    for _ in range(20):  # 16 changes an hour
        assert autopilot.decide(observation, 0.0).changes
        autopilot.undo()


def test_a_start_that_is_taken_back_leaves_the_last_change_of_a_role_in_force() -> None:
    autopilot = Autopilot(replace(RULES, between_s=1000.0, dwell_s=0.0, max_workers=20))
    observation = seen(Split(4, 12), 6.0, 5)
    observation = applied(observation, autopilot.decide(observation, 0.0), 0.1)
    flood, actions = replace(observation, traffic=Traffic(10.0, 300, 300.0, 100, 100, 100)), set()
    for now_s in range(1, 40):
        decision = autopilot.decide(flood, float(now_s))
        actions.add(decision.action)
        if decision.changes:
            autopilot.undo()
    assert actions == {"hold", "add_worker"}, "roles changed a moment ago"


def test_a_forecast_moves_workers_ahead_of_the_traffic() -> None:
    autopilot, observation = Autopilot(RULES), seen(Split(4, 12), 0.5, 2)
    assert not autopilot.decide(observation, 0.0).changes
    advice = Advice(Demand(8.0, 1.0, 300.0, 500.0), Split(11, 5), 60.0)
    decision = autopilot.decide(observation, 1.0, advice)
    assert (decision.action, decision.role, decision.target) == ("change_role", "prefill", Split(11, 5))
    assert not autopilot.decide(observation, 100.0, advice).changes, "it is out of date"


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.lists(st.tuples(st.floats(0, 15), st.integers(0, 60)), min_size=1, max_size=40),
)
def test_it_always_leaves_a_cluster_that_serves(prefill: int, decode: int, loads: list[tuple[float, int]]) -> None:
    autopilot, split = Autopilot(replace(RULES, dwell_s=3.0)), Split(prefill, decode)
    observation = seen(split, 0.0, 0)
    for number, (work_per_s, running) in enumerate(loads):
        now_s = 2.0 * number
        observation = replace(
            observation,
            traffic=Traffic(10.0, round(10 * work_per_s), 10 * work_per_s, 10, 10, 10),
            workers=tuple(
                replace(each, num_running=running, context_tokens=500.0 * running) if each.role != "prefill" else each
                for each in observation.workers
            ),
        )
        decision = autopilot.decide(observation, now_s)
        if decision.changes:
            worker = next(each for each in observation.workers if each.worker_id == decision.worker_id)
            assert now_s - worker.changed_s >= 3.0, "the dwell time"
            assert decision.predicted.most < decision.pressure.most, "it promises something"
            observation = applied(observation, decision, now_s)
        assert observation.split.serves
        assert observation.split.total == prefill + decode


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.floats(0.01, 20), st.floats(1, 5000), st.integers(0, 8))
def test_more_workers_are_pressed_less(prefill: int, decode: int, work: float, tokens: float, both: int) -> None:
    capacity = Capacity(SPEED, TTFT_S, TPOT_S, 0.9)
    demand, split = Demand(work, 0.5, tokens, 400.0), Split(prefill, decode, both)
    pressure = capacity.pressure(split, demand).most
    for role in ROLES:
        assert capacity.pressure(split.plus(role), demand).most <= pressure * (1 + 1e-9)


def test_rules_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="idle must be less than pressed"):
        ScalingRules(idle=0.9)
    with pytest.raises(InvalidRequest, match="min_workers exceeds"):
        ScalingRules(min_workers=5, max_workers=4)
