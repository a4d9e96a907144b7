"""Steps to come: each is what `form_step` forms of those that are left."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.forecast.pending_prompts import PendingPrompts
from halfmoon.policy.forecast.prefill_step import PredictedChunk, Prompt, StepRoom, by_rank, form_step

ROOM = StepRoom(100, 100)

waiting = st.tuples(st.integers(1, 250), st.integers(-1, 1), st.sampled_from([-math.inf, 1.0, 3.0]))


def prompt(order: int, new_tokens: int, priority: int = 0, ready_s: float = -math.inf) -> Prompt:
    return Prompt(str(order), order, new_tokens, 0, priority, ready_s, math.inf, None)


def told(step: list[PredictedChunk]) -> list[tuple[int, int, int, int]]:
    return [(one.order, one.new_tokens, one.known_tokens, num_tokens) for one, num_tokens in step]


def behind(step: list[PredictedChunk], prompts: list[Prompt]) -> list[Prompt]:
    """Who is left when it is over."""
    computed = {id(one): num_tokens for one, num_tokens in step}
    left = [one.without(computed[id(one)]) if id(one) in computed else one for one in prompts]
    return [one for one in left if one.new_tokens]


@given(st.lists(waiting, max_size=8), st.lists(st.tuples(st.integers(0, 4), waiting), max_size=4), st.integers(1, 9))
def test_each_step_is_formed_of_what_those_before_it_left(
    rows: list[tuple[int, int, float]], coming: list[tuple[int, tuple[int, int, float]]], places: int
) -> None:
    room = StepRoom(100, 100, places)
    left = [prompt(order, *row) for order, row in enumerate(rows)]
    came = [(number, prompt(len(rows) + order, *row)) for order, (number, row) in enumerate(coming)]
    ahead = PendingPrompts(left)
    for number in range(12):
        now_s = 0.5 * number
        expected = form_step(by_rank(left), room, now_s)
        step = ahead.next_step(room, now_s)
        assert told(step) == told(expected)
        for one in [one for at, one in came if at == number]:
            left.append(one)
            ahead.add(one)
        assert [one.order for one in ahead.end(step)] == [one.order for one, num in expected if num == one.new_tokens]
        left = behind(expected, left)
        assert len(ahead) == len(left)


def test_prompts_stay_as_they_are() -> None:
    one = prompt(0, 250)
    ahead = PendingPrompts([one])
    assert ahead.end(ahead.next_step(ROOM, 0.0)) == []
    assert (one.new_tokens, one.known_tokens) == (250, 0)


def test_the_first_that_is_restored_is_told() -> None:
    assert PendingPrompts([prompt(0, 5, ready_s=3.0), prompt(1, 5, ready_s=2.0)]).ready_s == 2.0
