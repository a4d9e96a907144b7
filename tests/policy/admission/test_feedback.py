"""Feedback: targets tighten while too many requests are late, and recover."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.admission.feedback import Feedback
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.values import AdmissionTargets, UnloadedLatency

GOLD = QosClass("gold", -1, ttft_s=1.0)


def fed(feedback: Feedback, qos: QosClass, ttft_s: Sequence[float], entered_s: float, ended_s: float) -> None:
    for one_s in ttft_s:
        feedback.add(qos, one_s, 0.01, UnloadedLatency(), entered_s, ended_s)


def test_targets_tighten_while_too_many_are_late_and_recover() -> None:
    feedback = Feedback()
    assert feedback.targets(GOLD, 0.0) == AdmissionTargets(1.0, None)
    seen = []
    for step in range(0, 40, 2):
        fed(feedback, GOLD, [1.05] * 30, step, step + 1.0)
        seen.append(feedback.targets(GOLD, step + 1.0).ttft_s)
    assert seen == sorted(seen, key=lambda one: -(one or 0))
    assert seen[0] == pytest.approx(0.9)
    assert seen[-1] == 0.5  # not below
    fed(feedback, GOLD, [0.1] * 600, 39.0, 39.0)
    assert feedback.targets(GOLD, 39.5) == AdmissionTargets(0.5, None)  # once a second at most
    later = [feedback.targets(GOLD, 100.0 + 2 * step).ttft_s for step in range(60)]  # nothing was measured since
    assert later[-1] == 1.0


@given(st.floats(0.0, 1.5), st.integers(1, 20))
def test_no_target_is_tightened_to_what_nobody_could_meet_alone(alone_s: float, num_steps: int) -> None:
    feedback, qos = Feedback(), QosClass("x", ttft_s=1.0, tbt_s=1.0)
    for step in range(0, 2 * num_steps, 2):
        for _ in range(20):
            feedback.add(qos, 1.5, 1.5, UnloadedLatency(alone_s, alone_s), step, step + 1.0)
        feedback.targets(qos, step + 1.0)
    found = feedback.targets(qos, 2.0 * num_steps)
    least_s = min((1 + alone_s) / 2, 1.0)
    assert (found.ttft_s, found.tbt_s) == pytest.approx((max(0.9**num_steps, least_s),) * 2)


def test_the_slowest_few_set_no_limit() -> None:
    feedback = Feedback()
    for step in range(0, 40, 2):
        for number in range(40):
            feedback.add(GOLD, 1.05, None, UnloadedLatency(0.9 if number == 0 else 0.2), step, step + 1.0)
        feedback.targets(GOLD, step + 1.0)
    assert feedback.targets(GOLD, 40.0).ttft_s == pytest.approx(0.6)


def test_who_comes_rarely_finds_what_has_relaxed_meanwhile() -> None:
    often, rarely = Feedback(), Feedback()
    for feedback in (often, rarely):
        for step in range(0, 20, 2):
            fed(feedback, GOLD, [1.05] * 30, step, step + 1.0)
            feedback.targets(GOLD, step + 1.0)
    for second in range(20, 101):
        often.targets(GOLD, float(second))
    found = rarely.targets(GOLD, 100.0).ttft_s
    assert found == pytest.approx(often.targets(GOLD, 100.5).ttft_s)  # of the minute in which they were late nothing
    assert 0.7 < (found or 0) < 0.8
    assert rarely.targets(GOLD, 161.0).ttft_s == 1.0


@pytest.mark.parametrize(("attainment", "tightens"), [(0.9, False), (0.99, True)])
def test_those_who_may_be_late_do_not_tighten(attainment: float, tightens: bool) -> None:
    feedback, qos = Feedback(), QosClass("some", ttft_s=1.0, attainment=attainment)
    fed(feedback, qos, [3.0] * 5 + [0.85] * 95, 0.0, 1.0)
    assert (feedback.targets(qos, 1.0).ttft_s != 1.0) is tightens


def test_a_step_down_waits_for_what_the_last_one_did() -> None:
    feedback = Feedback()
    fed(feedback, GOLD, [1.2] * 30, 0.0, 5.0)
    assert feedback.targets(GOLD, 5.0).ttft_s == pytest.approx(0.9)
    fed(feedback, GOLD, [1.2] * 30, 4.0, 10.0)  # let in before it
    fed(feedback, GOLD, [1.2] * 10, 6.0, 10.0)
    assert feedback.targets(GOLD, 10.0).ttft_s == pytest.approx(0.9)
    fed(feedback, GOLD, [1.2] * 10, 6.0, 10.0)
    assert feedback.targets(GOLD, 11.0).ttft_s == pytest.approx(0.81)


def test_fast_requests_loosen_what_was_tightened() -> None:
    feedback, tight = Feedback(), QosClass("tight", tbt_s=0.1)
    for _ in range(30):
        feedback.add(tight, 9.0, 0.2, UnloadedLatency(), 0.0, 0.0)
    assert (feedback.targets(tight, 1.0).tbt_s or 0) < 0.1
    for _ in range(30):
        feedback.add(tight, 9.0, 0.01, UnloadedLatency(), 10.0, 61.5)
    for step in range(40):
        feedback.targets(tight, 62.0 + step / 2)
    assert feedback.targets(tight, 83.0).tbt_s == 0.1


def test_a_new_target_is_not_tightened_by_what_missed_the_old_one() -> None:
    feedback, tight = Feedback(), QosClass("tight", ttft_s=1.0)
    fed(feedback, tight, [1.2] * 30, 0.0, 0.0)
    assert feedback.targets(tight, 0.0).ttft_s == pytest.approx(0.9)
    assert feedback.targets(QosClass("tight", ttft_s=2.0), 2.0).ttft_s == 2.0
    assert feedback.targets(QosClass("tight", ttft_s=1.1), 3.0).ttft_s == pytest.approx(0.9 * 1.1)  # too many again


def test_what_is_tightened_says_why_and_looking_changes_nothing() -> None:
    feedback = Feedback()
    assert feedback.tightenings(GOLD) == {}
    fed(feedback, GOLD, [1.2] * 30, 0.0, 5.0)
    assert feedback.tightenings(GOLD) == {}  # nobody asked for the targets yet
    feedback.targets(GOLD, 5.0)
    (found,) = feedback.tightenings(GOLD).values()
    assert found == pytest.approx((0.9, 1.2))
    assert found.explain(0.999) == "900 ms, because 99.9 % of its latest requests took up to 1.2 s"


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 3), st.floats(0.1, 3)), max_size=200),
    st.floats(0.01, 1.0),
)
def test_an_applied_target_never_exceeds_the_classs_own(
    requests: list[tuple[float, float, float]], attainment: float
) -> None:
    feedback, qos, now_s = Feedback(), QosClass("x", ttft_s=1.0, attainment=attainment), 0.0
    for ttft_s, unloaded_s, passed_s in requests:
        feedback.add(qos, ttft_s, None, UnloadedLatency(unloaded_s), now_s, now_s)
        now_s += passed_s
        applied_s = feedback.targets(qos, now_s).ttft_s
        assert applied_s is not None
        assert 0.5 <= applied_s <= 1.0
        tightening = feedback.tightenings(qos).get("ttft")
        assert (tightening is None) == (applied_s == 1.0)
