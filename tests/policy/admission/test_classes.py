"""Who is of which class, who may use how much, and how targets tighten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.policy.admission.classes import Caller, ClassTable, MatchRule, QosClass
from halfmoon.policy.admission.feedback import Feedback
from halfmoon.policy.admission.reservations import Reservations
from halfmoon.policy.models.output_lengths import OutputLengths
from halfmoon.policy.values import AdmissionTargets, UnloadedLatency

GOLD = QosClass(
    "gold", -1, 0.5, rules=(MatchRule("header", "gold", "X-Customer-Tier"), MatchRule("api_key", "key-1")), ttft_s=1.0
)
BULK = QosClass("bulk", 5, rules=(MatchRule("model", "cheap"),))


def test_the_first_rule_that_holds_by_priority() -> None:
    table = ClassTable((BULK, GOLD))
    assert table.of(Caller({"x-customer-tier": "gold"}, model="cheap")) is GOLD
    assert table.of(Caller({}, api_key="key-1")) is GOLD
    assert table.of(Caller({"x-customer-tier": "silver"}, model="cheap")) is BULK
    assert table.of(Caller({})).name == "default"
    mine = QosClass("default", ttft_s=2.0)
    assert ClassTable((mine,)).of(Caller({})) is mine


@pytest.mark.parametrize(
    ("param", "changed"),
    [
        ("name", {"name": ""}),
        ("reserved", {"reserved": 1.5}),
        ("attainment", {"attainment": 0.0}),
        ("ttft_s", {"ttft_s": 0.0}),
        ("tbt_s", {"tbt_s": -1.0}),
        ("capped_tokens", {"capped_tokens": 0}),
        ("degradation", {"degradation": ("cap_max_tokens", "cap_max_tokens")}),
        ("rules", {"rules": (MatchRule("header", "gold"),)}),
        ("rules", {"rules": (MatchRule("api_key", ""),)}),
        ("reserved", {"reserved": float("nan")}),
    ],
)
def test_what_no_class_can_be(param: str, changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        QosClass(**{"name": "x", **changed})
    assert caught.value.param == param


def test_what_no_table_can_be() -> None:
    for classes in ((GOLD, GOLD), (GOLD, QosClass("other", reserved=0.6))):
        with pytest.raises(InvalidRequest):
            ClassTable(classes)


def test_shares_that_are_everything_are_not_more_than_that() -> None:
    ClassTable(QosClass(str(number), reserved=share) for number, share in enumerate((0.1, 0.1, 0.1, 0.7)))
    ClassTable(QosClass(str(number), reserved=1 / 49) for number in range(49))


def test_a_reservation_is_lent_until_its_owner_comes() -> None:
    shares = Reservations()
    classes = (GOLD, BULK)

    def may(qos: QosClass, num_tokens: int, now_s: float) -> bool:
        return shares.may_use(qos, num_tokens, 100.0, classes, now_s)

    assert may(BULK, 90, 0.0)  # the owner is away
    shares.take("bulk", 90)
    assert may(GOLD, 40, 1.0)  # within its half, full or not
    assert not may(BULK, 20, 2.0)
    shares.take("gold", 40)
    shares.give_back("gold", 40)
    shares.give_back("bulk", 50)
    assert not may(BULK, 30, 3.0)  # gold wanted 40 a moment ago
    assert may(BULK, 20, 3.0)
    assert may(BULK, 600, 60.0)  # and is away again


def test_a_reservation_counts_what_other_gateways_use() -> None:
    shares = Reservations()

    def may(qos: QosClass, num_tokens: int, in_use_tokens: float) -> bool:
        return shares.may_use(qos, num_tokens, 100.0, (GOLD, BULK), 0.0, in_use_tokens)

    assert may(BULK, 10, 95.0)  # the owner is away: workers say how full they may be
    assert may(GOLD, 40, 95.0)
    shares.take("bulk", 10)
    assert may(BULK, 30, 30.0)  # 10 of which are ours
    assert not may(BULK, 30, 31.0)


@given(st.lists(st.tuples(st.sampled_from([GOLD, BULK]), st.integers(1, 60)), max_size=30))
def test_an_owner_always_gets_its_share_and_borrowers_never_more_than_there_is(
    wishes: list[tuple[QosClass, int]],
) -> None:
    shares, used, gold_came = Reservations(), {"gold": 0, "bulk": 0}, False
    for now_s, (qos, num_tokens) in enumerate(wishes):
        granted = shares.may_use(qos, num_tokens, 100.0, (GOLD, BULK), float(now_s))
        if used[qos.name] + num_tokens <= qos.reserved * 100:
            assert granted
        elif qos is BULK and gold_came and sum(used.values()) + num_tokens > 100:
            assert not granted
        gold_came = gold_came or qos is GOLD
        if granted:
            shares.take(qos.name, num_tokens)
            used[qos.name] += num_tokens


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


def test_output_lengths() -> None:
    lengths = OutputLengths(window=16)
    assert lengths.predict("a", 100, 50) == 50
    for _ in range(20):
        lengths.add("a", 100, 10)
        lengths.add("a", 1000, 30)
    assert lengths.predict("a", 90, 50) == 10  # prompts of 64 to 127
    assert lengths.predict("a", 1000, 50) == 30
    assert 10 <= lengths.predict("a", 7, 50) <= 30  # of any length
    assert lengths.predict("a", 1000, 20) == 20  # not more than allowed
    assert lengths.predict("b", 100, 50) == 50
    for output in range(16):
        lengths.add("a", 100, output)
    assert lengths.predict("a", 100, 50, 0.5) == pytest.approx(7.5)  # the latest count
    assert lengths.predict("a", 100, 50, 1.0) == 15


def test_what_is_tightened_says_why_and_looking_changes_nothing() -> None:
    feedback = Feedback()
    assert feedback.tightenings(GOLD) == {}
    fed(feedback, GOLD, [1.2] * 30, 0.0, 5.0)
    assert feedback.tightenings(GOLD) == {}  # nobody asked for the targets yet
    feedback.targets(GOLD, 5.0)
    (found,) = feedback.tightenings(GOLD).values()
    assert found == pytest.approx((0.9, 1.2))
    assert found.explain(0.999) == "900 ms, because 99.9 % of its latest requests took up to 1.2 s"
