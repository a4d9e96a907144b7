"""How a step is shared: nobody gets more than there is, and the long prompt at least as much as the shorter ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.shared_step import is_long, share_out

STEP = 100


def shared(num_tokens: int, *shorter: int, room: int = STEP) -> tuple[int, list[int]]:
    own, others = share_out(num_tokens, sorted(shorter), int, room, STEP)
    assert [length for length, _ in others] == sorted(shorter)[: len(others)]
    return own, [num for _, num in others]


def test_who_has_more_than_half_a_step_or_than_its_rest_is_long() -> None:
    assert is_long(51, 100, STEP)
    assert not is_long(50, 100, STEP)
    assert is_long(31, 30, STEP)
    assert not is_long(51, 100, STEP, is_awaited=True)
    assert is_long(101, 100, STEP, is_awaited=True)


def test_shorter_ones_run_whole_in_half_of_the_room() -> None:
    assert shared(400, 10, 30) == (40, [10, 30])
    assert shared(400, 40, 45) == (40, [40])
    assert shared(400, 60, 70) == (50, [50])  # a part of the first, if nothing fits
    assert shared(400, 5) == (25, [5])  # a quarter of a step, at least
    assert shared(400, 5, room=20) == (15, [5])  # as far as there is room
    assert shared(12, 5, room=10) == (5, [5])
    assert shared(400) == (100, [])
    assert shared(400, 1, room=1) == (1, [])


@given(st.integers(1, 300), st.lists(st.integers(1, 200), max_size=6), st.integers(0, STEP))
def test_the_room_suffices_and_the_long_one_gets_its_part(num_tokens: int, shorter: list[int], room: int) -> None:
    own, others = shared(num_tokens, *shorter, room=room)
    assert own + sum(others) <= room
    assert own >= min(num_tokens, room - room // 2, max(sum(others), 1))
    assert own <= num_tokens
    assert all(others)
