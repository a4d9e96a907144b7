"""The gaps of an answer whose steps hold chunks of prompts, too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.answer_pace import pace_among_prompts


def test_prompts_take_their_share() -> None:
    assert pace_among_prompts(0.1, 1.0, share=0.0, behind_s=0.0, num_gaps=10) == 0.1
    assert pace_among_prompts(0.1, 1.0, share=0.5, behind_s=0.0, num_gaps=10) == pytest.approx(0.15)
    assert pace_among_prompts(0.1, 1.0, share=0.5, behind_s=2.0, num_gaps=10) == pytest.approx(0.35)


@given(st.floats(0.001, 1), st.floats(0, 1), st.floats(0, 5), st.floats(0, 100), st.floats(1, 1000))
def test_no_step_has_less_than_its_token_or_more_than_a_chunk_with_it(
    step_s: float, chunk_s: float, share: float, behind_s: float, num_gaps: float
) -> None:
    assert step_s <= pace_among_prompts(step_s, chunk_s, share, behind_s, num_gaps) <= step_s + chunk_s
