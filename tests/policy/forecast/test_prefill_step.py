"""A step is full, or has all prompts that are ready, in their order, or ends with those that share it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.forecast.prefill_step import PredictedChunk, Prompt, StepRoom, by_rank, form_step, work_s
from halfmoon.policy.models.latency import PrefillModel

STEP = 100


def prompt(order: int, new_tokens: int, priority: int = 0, ready_s: float = -math.inf, known_tokens: int = 0) -> Prompt:
    return Prompt(str(order), order, new_tokens, known_tokens, priority, ready_s, math.inf, None)


def sizes(*prompts: Prompt, now_s: float = 0.0, places: int = 9) -> list[tuple[int, int]]:
    return [
        (one.order, num_tokens) for one, num_tokens in form_step(by_rank(prompts), StepRoom(STEP, STEP, places), now_s)
    ]


def test_a_long_prompt_has_as_many_tokens_as_shorter_ones_of_its_priority() -> None:
    assert sizes(prompt(0, 400), prompt(1, 30), prompt(2, 10)) == [(0, 40), (2, 10), (1, 30)]
    assert sizes(prompt(0, 400), prompt(1, 45), prompt(2, 40)) == [(0, 40), (2, 40)]  # the third would only begin
    assert sizes(prompt(0, 400), prompt(1, 90)) == [(0, 50), (1, 50)]
    assert sizes(prompt(0, 400), prompt(1, 5)) == [(0, 25), (1, 5)]  # a quarter of a step, at least
    assert sizes(prompt(0, 60), prompt(1, 40)) == [(0, 40), (1, 40)]  # though both would fit
    assert sizes(prompt(0, 60), prompt(1, 60)) == [(0, 60), (1, 40)]
    assert sizes(prompt(0, 400), prompt(1, 30, priority=1)) == [(0, 100)]
    assert sizes(prompt(0, 400, priority=1), prompt(1, 30)) == [(1, 30), (0, 70)]


def test_shorter_ones_share_what_those_before_leave() -> None:
    assert sizes(prompt(0, 30), prompt(1, 70), prompt(2, 5)) == [(0, 30), (1, 25), (2, 5)]
    assert sizes(prompt(0, 50), prompt(1, 50), prompt(2, 5)) == [(0, 50), (1, 50)]  # neither is long
    assert sizes(prompt(0, 90), prompt(1, 30, priority=1), prompt(2, 20, priority=1)) == [(0, 90), (1, 5), (2, 5)]


def test_who_waits_for_what_is_restored_is_not_in_it() -> None:
    late = prompt(0, 50, ready_s=2.0)
    assert sizes(late, prompt(1, 60)) == [(1, 60)]
    assert sizes(late, prompt(1, 60), now_s=2.0) == [(0, 50), (1, 50)]
    assert sizes(prompt(0, 60), late) == [(0, 60)]


def test_it_has_no_more_prompts_than_places() -> None:
    assert sizes(prompt(0, 10), prompt(1, 10), prompt(2, 10), places=2) == [(0, 10), (1, 10)]
    late = prompt(0, 10, ready_s=2.0)
    assert sizes(late, prompt(1, 10), prompt(2, 10), prompt(3, 10), places=2) == [(1, 10), (2, 10)]
    long = prompt(0, 400)
    assert sizes(long, prompt(1, 30), prompt(2, 10), places=2) == [(0, 30), (1, 30)]  # as the third has no place


def test_its_time_is_that_of_its_tokens_and_of_those_before_them() -> None:
    step = [PredictedChunk(prompt(0, 50, known_tokens=100), 50), PredictedChunk(prompt(1, 90), 10)]
    assert work_s(step, PrefillModel(0.5, 0.01, 0.001)) == 0.5 + 0.01 * 60 + 0.001 * (50 * 125 + 10 * 5)
    assert work_s([], PrefillModel(0.5, 0.01, 0.001)) == 0.0


waiting = st.tuples(st.integers(1, 250), st.integers(-1, 1), st.sampled_from([-math.inf, 1.0, 3.0]))


@given(st.lists(waiting, max_size=8), st.floats(0, 4))
def test_it_is_full_or_has_all_that_are_ready_or_is_shared(rows: list[tuple[int, int, float]], now_s: float) -> None:
    prompts = [prompt(order, *row) for order, row in enumerate(rows)]
    step = form_step(by_rank(prompts), StepRoom(STEP, STEP), now_s)
    ready = by_rank(one for one in prompts if one.ready_s <= now_s)
    assert all(0 < num_tokens <= one.new_tokens and one in ready for one, num_tokens in step)
    assert len({one.order for one, _ in step}) == len(step)
    is_full = sum(num_tokens for _, num_tokens in step) == min(sum(one.new_tokens for one in ready), STEP)
    in_rank = [one for one, _ in step] == ready[: len(step)]
    assert (is_full and in_rank) or any(is_shared_by(step, at, ready) for at in range(len(step) - 1))


def is_shared_by(step: list[PredictedChunk], at: int, ready: list[Prompt]) -> bool:
    """Whether all from there on share what those before leave."""
    long, others = step[at], sum(num_tokens for _, num_tokens in step[at + 1 :])
    in_rank = all(one is other for (one, _), other in zip(step[: at + 1], ready, strict=False))
    are_whole = all(num_tokens == one.new_tokens for one, num_tokens in step[at + 1 :])
    are_shorter = all(
        one.priority == long.prompt.priority and one.new_tokens < long.prompt.new_tokens for one, _ in step[at + 1 :]
    )
    return (
        in_rank
        and are_shorter
        and (are_whole or len(step) == at + 2)
        and long.num_tokens >= min(long.prompt.new_tokens, others)
    )
