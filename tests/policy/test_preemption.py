"""The rule of pauses: who gives way to whom, for how long at most, and in which order room is given."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.preemption import Pauses, Queued, Turns, in_turn, take_turns

HIGH, LOW = Pauses(0), Pauses(1, 10.0)


@dataclass(eq=False)
class Answer:
    rank: int
    pauses: Pauses = field(default_factory=Pauses)
    num_blocks: int = 1


def turns(
    queue: list[Queued[Answer]], running: list[Answer], places: int, blocks: int, tokens: int = 100
) -> Turns[Answer]:
    return take_turns(queue, running, places, blocks, tokens, lambda one: one.num_blocks, now_s=0.0)


def test_only_a_lower_class_that_allows_it_gives_way() -> None:
    assert LOW.gives_way_to(HIGH, 0.0)
    assert not HIGH.gives_way_to(LOW, 0.0)
    assert not LOW.gives_way_to(Pauses(1), 0.0)
    assert not Pauses(1).gives_way_to(HIGH, 0.0)


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=30), st.floats(0.1, 8.0))
def test_pauses_are_bounded_in_any_stretch_of_time(changes_s: list[float], allowance_s: float) -> None:
    """An answer that is paused whenever it may be, and goes on as soon as it must."""
    pauses, now_s, spans = Pauses(1, allowance_s), 0.0, []
    for wanted_s in changes_s:
        if pauses.has_risen(now_s):
            now_s += wanted_s + 0.001
            continue
        pauses.pause(now_s)
        begun_s = now_s
        risen_after_ns = bisect_left(
            range(int(wanted_s * 1e9)), True, key=lambda ns: pauses.has_risen(begun_s + ns / 1e9)
        )
        now_s += risen_after_ns / 1e9
        spans.append((begun_s, now_s))
        pauses.resume(now_s)
        now_s += 0.001
    for first, (begin_s, _) in enumerate(spans):
        for _, end_s in spans[first:]:
            paused_s = sum(end - begin for begin, end in spans if begin_s <= begin and end <= end_s)
            assert paused_s <= (end_s - begin_s - paused_s) + allowance_s + 1e-6


def test_what_has_risen_goes_first_and_is_not_paused_until_it_has_run_for_as_long() -> None:
    answer, other = Answer(5, Pauses(1, 2.0)), Answer(1)
    answer.pauses.pause(1.0)
    assert [one.rank for one in in_turn([answer, other], 2.9)] == [1, 5]
    assert [one.rank for one in in_turn([answer, other], 3.0)] == [5, 1]
    answer.pauses.resume(3.5)
    assert not answer.pauses.gives_way_to(HIGH, 5.9)
    assert answer.pauses.gives_way_to(HIGH, 6.1)


def test_a_prompt_gets_a_place_from_the_last_of_a_lower_class() -> None:
    running = [Answer(1, Pauses(0)), Answer(2, Pauses(1, 9.0)), Answer(3, Pauses(1, 9.0))]
    prompt = Answer(0, Pauses(0))
    found = turns([Queued(prompt, 1, 10)], running, places=0, blocks=5)
    assert [one.rank for one in found.pause] == [3]
    assert found.get_room == [prompt]
    assert not found.bars


def test_nothing_is_paused_for_a_prompt_that_would_not_get_enough() -> None:
    running = [Answer(2, Pauses(1, 9.0), 2)]
    found = turns([Queued(Answer(0), 9, 10)], running, places=1, blocks=5)
    assert found.bars
    assert not found.pause
    assert [one.rank for one in turns([Queued(Answer(0), 7, 10)], running, places=1, blocks=5).pause] == [2]


def test_nothing_is_paused_for_a_prompt_that_waits_for_its_turn_to_be_computed() -> None:
    running = [Answer(2, Pauses(1, 9.0))]
    assert not turns([Queued(Answer(0), 1, 10)], running, places=0, blocks=5, tokens=0).pause


def test_a_paused_answer_goes_on_where_there_is_room_and_bars_those_behind_it_where_there_is_none() -> None:
    paused, later = Answer(4, Pauses(1, 9.0)), Answer(6, Pauses(1, 9.0))
    queue = [Queued(paused, 3), Queued(later, 1, 10)]
    assert turns(queue, [], places=2, blocks=4).get_room == [paused]
    found = turns(queue, [], places=2, blocks=2)
    assert found.bars
    assert not found.passed
