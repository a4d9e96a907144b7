"""Whom a full cluster refuses: who is above its share, as long as others want theirs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.admission.tenant_room import TenantRoom
from halfmoon.policy.admission.tenants import Tenant

A, B, HEAVY = Tenant("a"), Tenant("b"), Tenant("heavy", weight=3.0)


def filled(tenant: Tenant, num: int = 10, now_s: float = 0.0) -> TenantRoom:
    """Ten places of 100, all of one tenant."""
    room = TenantRoom()
    for _ in range(num):
        assert room.may_use(tenant, 100, now_s)
        room.take(tenant, 100)
    return room


def refuse(room: TenantRoom, tenant: Tenant, now_s: float) -> None:
    """A request that finds no room on any worker."""
    assert room.may_use(tenant, 100, now_s)
    room.take(tenant, 100)
    room.note_full(100, now_s)
    room.give_back(tenant, 100)


def test_while_there_is_room_nobody_is_refused() -> None:
    room = filled(A)
    assert room.may_use(A, 100, 0.0)
    assert room.may_use(B, 100, 0.0)


def test_what_becomes_free_is_for_who_has_less() -> None:
    room = filled(A)
    refuse(room, B, 1.0)
    room.give_back(A, 100)
    assert not room.may_use(A, 100, 2.0)
    assert room.may_use(B, 100, 2.0)
    room.take(B, 100)
    room.give_back(A, 100)
    assert room.may_use(A, 100, 3.0)  # the other one wanted no more than it has


def test_demand_that_is_over_is_forgotten() -> None:
    room = filled(A)
    refuse(room, B, 1.0)
    room.give_back(A, 100)
    assert not room.may_use(A, 100, 30.0)
    assert room.may_use(A, 100, 40.0)


def test_one_who_was_alone_when_the_cluster_was_full_has_all_of_it() -> None:
    room = filled(A)
    refuse(room, A, 1.0)
    room.give_back(A, 100)
    assert room.may_use(A, 100, 2.0)


def test_weights_make_larger_shares() -> None:
    room = filled(HEAVY)
    refuse(room, B, 1.0)
    for _ in range(4):
        room.give_back(HEAVY, 100)
    assert room.may_use(HEAVY, 100, 2.0)  # 600 and 100 of 750


def test_a_part_of_a_place_is_kept_for_nobody() -> None:
    """Eight places, three tenants: a share is two places and two thirds, so three of two leave one to whoever comes."""
    room = TenantRoom()
    for name in "aaabbbcc":
        assert room.may_use(Tenant(name), 100, 0.0)
        room.take(Tenant(name), 100)
    room.may_use(Tenant("c"), 100, 0.0)
    room.take(Tenant("c"), 100)
    room.note_full(100, 0.0)
    room.give_back(Tenant("c"), 100)
    room.give_back(Tenant("b"), 100)
    assert [room.may_use(Tenant(name), 100, 1.0) for name in "abc"] == [True] * 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 10)), max_size=200))
def test_of_equal_requests_somebody_who_wants_a_free_place_gets_it(steps: list[tuple[str, bool, float]]) -> None:
    """Work conserving: if one tenant is refused though there is a place, another one may have it."""
    room, inside, now_s = TenantRoom(), dict.fromkeys("abc", 0), 0.0
    for name, ends, pause_s in steps:
        now_s += pause_s
        tenant = Tenant(name)
        if ends and inside[name]:
            inside[name] -= 1
            room.give_back(tenant, 100)
        elif room.may_use(tenant, 100, now_s):
            room.take(tenant, 100)
            if sum(inside.values()) == 8:
                room.note_full(100, now_s)
                room.give_back(tenant, 100)
            else:
                inside[name] += 1
        elif sum(inside.values()) < 8:
            others = [Tenant(other) for other in "abc" if other != name]
            assert any(room.may_use(other, 100, now_s) for other in others)
