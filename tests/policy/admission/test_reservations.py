"""Reserved shares: an owner gets its share, and lends what it does not use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.reservations import Reservations

GOLD, BULK = QosClass("gold", -1, 0.5), QosClass("bulk", 5)


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


@given(st.lists(st.tuples(st.sampled_from(["gold", "bulk"]), st.integers(1, 60)), max_size=30))
def test_what_was_taken_and_given_back_leaves_nothing_used(requests: list[tuple[str, int]]) -> None:
    shares = Reservations()
    for name, num_tokens in requests:
        shares.take(name, num_tokens)
    for name, num_tokens in reversed(requests):
        shares.give_back(name, num_tokens)
    assert shares.may_use(BULK, 100, 100.0, (GOLD, BULK), 0.0)
    assert shares.may_use(GOLD, 50, 100.0, (GOLD, BULK), 0.0)


def test_an_owner_that_has_not_asked_keeps_nothing_free() -> None:
    shares = Reservations()
    assert shares.may_use(BULK, 1_000, 100.0, (GOLD, BULK), 0.0)
    assert shares.may_use(GOLD, 60, 100.0, (GOLD, BULK), 0.0)  # beyond its share, while no other owner is there
    assert not shares.may_use(BULK, 1_000, 100.0, (GOLD, BULK), 30.0)
    assert shares.may_use(BULK, 1_000, 100.0, (GOLD, BULK), 30.1)
