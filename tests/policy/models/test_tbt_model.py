"""The gaps of an answer while prompts are computed, in its steps or beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.tbt_model import tbt_among_prompts, tbt_with_interference
from halfmoon.policy.retries import retry_ms_when_full


def test_prompts_in_its_steps_take_their_time() -> None:
    assert tbt_among_prompts(0.1, 1.0, prompts_s=0.0, num_gaps=10) == 0.1
    assert tbt_among_prompts(0.1, 1.0, prompts_s=2.0, num_gaps=10) == pytest.approx(0.3)


@given(st.floats(0.001, 1), st.floats(0, 1), st.floats(0, 100), st.floats(1, 1000))
def test_no_step_has_less_than_its_token_or_more_than_a_chunk_with_it(
    step_s: float, chunk_s: float, prompts_s: float, num_gaps: float
) -> None:
    assert step_s <= tbt_among_prompts(step_s, chunk_s, prompts_s, num_gaps) <= step_s + chunk_s


def test_neighbours_slow_it_down_as_far_as_they_are_busy() -> None:
    assert tbt_with_interference(0.1, 0.5, usual=0.0, behind_s=0.0, num_gaps=10) == 0.1
    assert tbt_with_interference(0.1, 0.5, usual=1.0, behind_s=0.0, num_gaps=10) == pytest.approx(0.15)
    assert tbt_with_interference(0.1, 0.5, usual=0.0, behind_s=0.5, num_gaps=10) == pytest.approx(
        0.125
    )  # half of its time
    assert tbt_with_interference(0.1, 0.5, usual=3.0, behind_s=9.0, num_gaps=10) == pytest.approx(0.25)


@given(st.floats(0.001, 1), st.floats(0, 3), st.floats(0, 5), st.floats(0, 100), st.floats(1, 1000))
def test_one_of_them_is_busy_all_the_time_at_most(
    step_s: float, contention: float, usual: float, behind_s: float, num_gaps: float
) -> None:
    least_s, most_s = step_s * (1 + contention * usual), step_s * (1 + contention * max(usual, 1.0))
    assert least_s <= tbt_with_interference(step_s, contention, usual, behind_s, num_gaps) <= most_s * (1 + 1e-9)


def test_room_is_there_when_the_first_answer_ends() -> None:
    assert retry_ms_when_full(0.05, [40, 7, 9]) == 350
    assert retry_ms_when_full(0.05, []) == 50
    assert (retry_ms_when_full(0.0, [3]), retry_ms_when_full(0.5, [900])) == (10, 10_000)
