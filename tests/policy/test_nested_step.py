"""A prompt runs in the middle of a step if that lowers the sum of waits, and the step loses no more than it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.nested_step import OuterStep, admit_nested, nested_cost


def chosen(outer: OuterStep, *lengths: int) -> list[int]:
    return admit_nested(outer, lengths, int, lambda _: True)


@pytest.mark.parametrize(
    ("outer", "most_tokens"),
    [
        (OuterStep(512, 1, 1.0), 256),
        (OuterStep(512, 1, 0.25), 127),  # it would gain 128 and take as many
        (OuterStep(512, 4, 1.0), 127),  # each of four loses what one gains
        (OuterStep(512, 1, 0.9, num_nested=400), 112),
        (OuterStep(512, 1, 0.9, num_nested=512), 0),
        (OuterStep(512, 1, 0.9, num_nested=450), 0),  # a step counts as 64 at least
        (OuterStep(512, 1, 0.125), 0),
        (OuterStep(512, 1, 0.0), 0),
        (OuterStep(100, 1, 1.0, num_nested=90), 0),  # as 16
        (OuterStep(31, 1, 1.0), 0),
    ],
)
def test_the_longest_prompt_that_runs_nested(outer: OuterStep, most_tokens: int) -> None:
    assert outer.most_tokens == most_tokens
    assert chosen(outer, most_tokens + 1) == []
    if most_tokens:
        assert chosen(outer, most_tokens) == [most_tokens]


def test_the_shortest_run_first_and_whole() -> None:
    assert chosen(OuterStep(512, 1, 1.0), 130, 100, 120) == [100, 120]


def test_nobody_runs_behind_one_that_finds_no_room_or_became_too_long() -> None:
    outer, is_admitted = OuterStep(512, 1, 1.0), {10: True, 20: False, 30: True}
    assert admit_nested(outer, [30, 20, 10], int, lambda one: is_admitted[one]) == [10]
    found, admitted = {"a": 10, "b": 20, "c": 30}, list[str]()

    def admit(name: str) -> bool:
        admitted.append(name)
        found["b"] = 257  # what it would have found was evicted
        return True

    assert admit_nested(outer, ["a", "b", "c"], lambda name: found[name], admit) == ["a"]
    assert admitted == ["a", "b"]


@given(st.integers(1, 600), st.integers(1, 6), st.floats(0, 1), st.lists(st.integers(1, 300), max_size=6))
def test_the_sum_of_waits_falls(num_tokens: int, num_prompts: int, left: float, lengths: list[int]) -> None:
    outer = OuterStep(num_tokens, num_prompts, left)
    nested = chosen(outer, *lengths)
    if nested:
        assert nested_cost(sum(nested), num_tokens) * num_prompts <= len(nested) * left * num_tokens
    assert sum(nested) <= num_tokens // 2
