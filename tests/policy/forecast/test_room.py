"""What pauses mean for predictions: who gives way to a newcomer, how long one waits, how long one is paused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.forecast.decode_forecast import DecodeForecast
from halfmoon.policy.forecast.room import Before, Decoding, Room, Rooms, beside, paused_for, paused_s, room_s
from halfmoon.policy.preemption import Pauses
from halfmoon.policy.values import DecodeLoad

EVERYTHING = Room(math.inf, math.inf)


@given(
    levels=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 5.0])), max_size=12),
    newcomer=st.integers(0, 2),
    places=st.integers(1, 12),
)
def test_as_many_leave_the_steps_as_the_rule_pauses(
    levels: list[tuple[int, float]], newcomer: int, places: int
) -> None:
    """All that give way leave where they are too few: the others go on, and the newcomer waits."""
    forecast = DecodeForecast()
    for number, (priority, max_pause_s) in enumerate(levels):
        forecast.join(str(number), 0, float(number), 90.0, 100, 0, class_priority=priority, max_pause_s=max_pause_s)
    others = [Decoding(n, Pauses(*level), float(n), 100.0) for n, level in enumerate(levels)]
    room = Room(places, math.inf)
    paused = paused_for(Decoding(99, Pauses(newcomer), 20.0, 100.0), others, room, 20.0)
    gives_way = [one for one in others if one.pauses.gives_way_to(Pauses(newcomer), 20.0)]
    num_lacking = max(len(levels) + 1 - places, 0)
    assert len(paused) == (num_lacking if num_lacking <= len(gives_way) else 0)
    assert all(one in gives_way for one in paused)
    rooms = Rooms(np.array([float(places)]), np.array([math.inf]))
    found = beside(
        forecast.loads(20.0, 20.0, 1), forecast.giving_way(newcomer, 20.0, 20.0, 20.0, 1), rooms, num_tokens=100
    )
    num_left = len(levels) - min(num_lacking, len(gives_way))
    assert found.batch.tolist() == pytest.approx([num_left])
    assert found.context_tokens.tolist() == pytest.approx([100 * num_left])


def test_memory_is_room_too() -> None:
    forecast = DecodeForecast()
    for number in range(4):
        forecast.join(str(number), 0, 0.0, 9.0, 100, 0, class_priority=1, max_pause_s=5.0)
    rooms = Rooms(np.array([math.inf]), np.array([450.0]))
    found = beside(forecast.loads(1.0, 1.0, 1), forecast.giving_way(0, 1.0, 1.0, 1.0, 1), rooms, num_tokens=150)
    assert found.batch.tolist() == pytest.approx([3])
    assert found.context_tokens.tolist() == pytest.approx([300])


def before(*lives: tuple[float, float], tokens: float = 100.0, usual: float = 0.0) -> Before:
    joins_s, ends_s = np.array(lives).reshape(-1, 2).T
    return Before(joins_s, ends_s, np.full(len(lives), tokens), lambda seconds: DecodeLoad(usual, 100 * usual))


@pytest.mark.parametrize(
    ("room", "expected_s"),
    [(EVERYTHING, 0.0), (Room(4, 1e9), 0.0), (Room(3, 1e9), 2.0), (Room(1, 1e9), 6.0), (Room(9, 200.0), 4.0)],
)
def test_a_place_is_free_when_enough_have_ended(room: Room, expected_s: float) -> None:
    found = room_s(before((0.0, 7.0), (0.0, 3.0), (2.0, 5.0)), room, 100, now_s=1.0)
    assert found == pytest.approx(expected_s)


def test_a_request_longer_than_the_room_waits_for_all() -> None:
    assert room_s(before((0.0, 7.0)), Room(1, 50.0), 100, now_s=1.0) == pytest.approx(6.0)
    assert room_s(before(), Room(1, 50.0), 100, now_s=1.0) == 0.0


def test_pauses_are_as_long_as_others_need_the_room() -> None:
    half = before((0.0, 5.0))  # of ten seconds
    assert paused_s(half, Room(1, 1e9), 100, 0.0, 10.0, 60.0) == pytest.approx(10.0)  # half of its stay
    assert paused_s(half, Room(2, 1e9), 100, 0.0, 10.0, 60.0) == 0.0
    assert paused_s(before(usual=0.5), Room(1, 1e9), 100, 0.0, 10.0, 60.0) == pytest.approx(10.0)


def test_pauses_are_bounded() -> None:
    for_ever = before((0.0, 1e6), (0.0, 1e6))
    assert paused_s(for_ever, Room(2, 1e9), 100, 0.0, 10.0, 5.0) == pytest.approx(15.0)


def test_a_paused_answer_ends_later() -> None:
    forecast = DecodeForecast()
    forecast.join("first", 0, 0.0, 10.0, 100, 10, class_priority=1, max_pause_s=60.0)
    forecast.join("last", 0, 1.0, 10.0, 100, 10, class_priority=1, max_pause_s=2.0)
    forecast.join("high", 0, 4.0, 7.0, 100, 10)
    forecast.pause_for("high", Room(2, math.inf))
    assert forecast.next_ends(0, 4.0).tolist() == [7.0, 10.0, 12.0]  # its class allows two seconds
    forecast.join("another", 0, 5.0, 8.0, 100, 10)
    forecast.pause_for("another", Room(2, math.inf))
    assert forecast.next_ends(0, 5.0).tolist() == [7.0, 8.0, 12.0, 14.0]
    forecast.join("elsewhere", 1, 5.0, 8.0, 100, 10)
    forecast.pause_for("elsewhere", Room(1, math.inf))
    assert forecast.next_ends(0, 5.0).tolist() == [7.0, 8.0, 12.0, 14.0]


def test_who_joins_usually_counts_by_class() -> None:
    forecast = DecodeForecast()
    for number in range(21):  # one a second, each for half a second
        forecast.join(str(number), 0, number, number + 0.5, 80, 40, class_priority=number % 2)
        forecast.begin(str(number), float(number))
        forecast.leave(str(number))
    everybody = forecast.mean_load(0, 20.0, 30.0, 20.0)
    assert forecast.before(0, 1, 20.0).usual(10.0).batch == pytest.approx(everybody.batch * 11 / 21)
    assert forecast.before(0, 0, 20.0).usual(10.0) == (0.0, 0.0)
