"""Virtual token counters: equal shares while tenants wait, no credit for idle time, nothing without tenants."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.admission.fair_shares import FairShares, queue_priority, token_cost
from halfmoon.policy.admission.tenants import Tenant

A, B = Tenant("a"), Tenant("b")
COSTS = st.integers(2_048, 200_000)
ARRIVALS = st.lists(st.tuples(st.sampled_from("abc"), COSTS), min_size=1, max_size=80)


class OneServer:
    """Owns a queue that serves one request after the other, by priority and arrival."""

    def __init__(self, weights: dict[str, float] | None = None) -> None:
        self.shares = FairShares()
        self.shares.is_on = True
        self.waiting: list[tuple[int, int, str, int]] = []
        self.served: Counter[str] = Counter()
        self.order: list[str] = []
        self._weights = weights or {}
        self._num = 0

    def arrive(self, name: str, cost: int, expected: int | None = None) -> None:
        tenant = Tenant(name, weight=self._weights.get(name, 1.0))
        self._num += 1
        self.waiting.append((self.shares.priority(0, tenant, 0), self._num, name, cost))
        self.shares.enter(str(self._num), 0, tenant, cost if expected is None else expected, cost)

    def serve(self) -> None:
        first = min(self.waiting)
        self.waiting.remove(first)
        _, number, name, cost = first
        self.shares.begin(str(number))
        self.served[name] += cost
        self.order.append(name)
        self.shares.leave(str(number), cost)


@given(ARRIVALS, ARRIVALS)
def test_two_who_always_wait_are_served_alike(
    first: Sequence[tuple[str, int]], second: Sequence[tuple[str, int]]
) -> None:
    """The bound of start-time fair queuing: one largest request of each, and a step of the tag."""
    server = OneServer()
    costs = {"a": deque(cost for _, cost in first), "b": deque(cost for _, cost in second)}
    most = {name: max(of) for name, of in costs.items()}
    for name, of in costs.items():
        for cost in of:
            server.arrive(name, cost)
    left = {name: len(of) for name, of in costs.items()}
    while all(left.values()):
        server.serve()
        left[server.order[-1]] -= 1
        assert abs(server.served["a"] - server.served["b"]) <= most["a"] + most["b"] + 2 * 2_048


@given(ARRIVALS, st.lists(st.booleans(), min_size=80, max_size=80))
def test_whoever_waits_is_served_and_nothing_is_left_over(arrivals: list[tuple[str, int]], when: list[bool]) -> None:
    server = OneServer()
    for (name, cost), serves in zip(arrivals, when, strict=False):
        server.arrive(name, cost)
        if serves:
            server.serve()  # work conserving: there is always somebody to serve
    while server.waiting:
        server.serve()
    assert server.served.total() == sum(cost for _, cost in arrivals)
    assert server.shares._charges == {}


def test_one_who_sends_ten_times_as_much_waits_for_the_other() -> None:
    server = OneServer()
    for _ in range(100):
        for _ in range(10):
            server.arrive("heavy", 5_000)
        server.arrive("light", 5_000)
        for _ in range(2):
            server.serve()
    assert server.served["light"] == pytest.approx(server.served["heavy"], rel=0.02)


def test_shares_follow_weights() -> None:
    server = OneServer({"a": 3.0})
    for _ in range(200):
        server.arrive("a", 5_000)
        server.arrive("b", 5_000)
    for _ in range(100):
        server.serve()
    assert server.served["a"] == pytest.approx(3 * server.served["b"], rel=0.1)


def test_idle_time_earns_no_credit() -> None:
    server = OneServer()
    for _ in range(50):
        server.arrive("a", 5_000)
    for _ in range(40):
        server.serve()
    for _ in range(50):
        server.arrive("b", 5_000)
    for _ in range(20):
        server.serve()
    assert Counter(server.order[-20:])["b"] <= 11  # and not 20, for the 40 that it did not ask for


def test_what_was_expected_is_corrected() -> None:
    server = OneServer()
    for _ in range(100):
        server.arrive("short", 10_000, expected=10_000)
        server.arrive("long", 50_000, expected=10_000)
        server.serve()
        while len(server.waiting) > 10:
            server.serve()
    assert server.served["long"] > 2 * server.served["short"]  # nobody waits for long: all are served
    before = server.shares._queues[0].counters.copy()
    server.arrive("x", 4_096, expected=0)
    while server.waiting:
        server.serve()
    assert server.shares._queues[0].counters["x"] >= before.get("x", 0.0) + 4_096


@given(st.integers(-1_000, 1_000), st.floats(0, 1e18), st.integers(-(2**31), 2**31 - 1), st.floats(0, 1e18))
def test_a_class_goes_before_the_whole_next_class(level: int, tag: float, requested: int, other: float) -> None:
    priority = queue_priority(level, tag, requested)
    assert -(2**63) <= priority < 2**63
    assert priority < queue_priority(level + 1, other, -(2**31))
    assert queue_priority(level, 0.0, requested) - queue_priority(level, 0.0, 0) == max(-500, min(requested, 499))


def test_off_nothing_is_counted() -> None:
    shares = FairShares()
    shares.enter("r", 0, A, 1e9, 5)
    assert (shares.priority(0, A, 7), shares.priority(2, B, 0)) == (queue_priority(0, 0, 7), queue_priority(2, 0, 0))
    shares.begin("r")
    shares.leave("r", 1.0)
    assert shares._charges == {}


def test_requests_of_several_gateways_are_not_ordered_by_tags() -> None:
    shares = FairShares(has_tags=False)
    shares.is_on = True
    shares.enter("r", 0, A, 1e9, 5)
    shares.begin("r")
    assert shares.priority(0, A, 0) == queue_priority(0, 0, 0)


def test_a_request_is_charged_once_and_a_dropped_one_costs_nothing() -> None:
    shares = FairShares()
    shares.is_on = True
    shares.enter("r", 0, A, token_cost(1_000, 500), 5)
    shares.enter("r", 0, A, token_cost(1_000, 500), 5)
    assert shares._queues[0].counters == {"a": 2_000}
    shares.leave("r", 2_000)  # it never began
    assert shares._queues[0].counters == {"a": 0.0}
    shares.enter("s", 0, A, 100.0, 5)
    shares.begin("s")
    shares.leave("s", 300.0)
    assert shares._queues[0].counters == {"a": 300.0}


def test_tenants_of_the_past_are_forgotten() -> None:
    shares = FairShares()
    shares.is_on = True
    for number in range(1_500):
        for name, tenant, cost in ((f"r{number}", Tenant(f"t{number}"), 10.0), (f"a{number}", A, 1_000.0)):
            shares.enter(name, 0, tenant, cost, 5)
            shares.begin(name)
            shares.leave(name, cost)
    assert len(shares._queues[0].counters) <= 1_025


def full_of_heavy(*, has_tags: bool = True) -> FairShares:
    """Four places of 100, all of `b`, while `a` waits for room: workers have refused two of its requests."""
    shares = FairShares(has_tags=has_tags)
    shares.is_on = True
    for number in range(4):
        assert shares.may_enter(0, B, 100, 0.0)
        shares.enter(f"b{number}", 0, B, 100, 100)
    for number in range(2):
        assert shares.may_enter(0, A, 100, 0.0)
        shares.enter(f"a{number}", 0, A, 100, 100)
        assert shares.note_full(f"a{number}", 0.0)
    return shares


def test_a_request_that_waits_for_room_has_none_of_its_tenants_share() -> None:
    shares = full_of_heavy()
    shares.leave("b0", 100)
    assert not shares.may_enter(0, B, 100, 1.0)  # the place is for one of those that wait
    shares.send("a0")
    assert not shares.may_enter(0, B, 100, 1.0)
    shares.leave("b1", 100)
    shares.send("a1")
    assert shares.may_enter(0, B, 100, 1.0)  # the other has what it wanted


def test_a_request_without_room_does_not_come_again_before_those_below_their_share() -> None:
    shares = full_of_heavy()
    shares.enter("late", 0, B, 100, 100)
    assert not shares.note_full("late", 1.0)
    shares.leave("late", 0.0)
    assert shares.note_full("a0", 1.0)
    assert shares.note_full("nobody", 1.0)


def test_room_is_given_back_once_however_often_it_was_wanted_in_vain() -> None:
    shares = full_of_heavy()
    shares.note_full("a0", 1.0)
    for number in range(2):
        shares.leave(f"a{number}", 0.0)
    for number in range(4):
        shares.leave(f"b{number}", 100)
    room = shares._rooms[0]
    assert room._total == 0
    assert not any(use.used for use in room._uses.values())


def test_beside_other_gateways_a_request_keeps_its_room_and_comes_again() -> None:
    shares = full_of_heavy(has_tags=False)
    shares.enter("late", 0, B, 100, 100)
    assert shares.note_full("late", 1.0)
    assert sum(use.used for use in shares._rooms[0]._uses.values()) == 700
