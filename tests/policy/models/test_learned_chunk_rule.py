"""Chunks that follow targets while the worker's speed changes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.chunk_length import CONSTANT_CHUNKS, ChunkRule, StepDecodes, chunk_s
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.models.learned_chunk_rule import LearnedChunkRule
from halfmoon.policy.models.measured_step import MeasuredStep

RULE = ChunkRule(PrefillModel(0.01, 0.0005, 1e-7), StepModel(0.01, 0.001, 0.0))
TWO = StepDecodes(2, 100, 0.12)


def mixed(num_tokens: int, times: float = 1.0) -> MeasuredStep:
    """A step of two decodes and a chunk, as long as the rule says, times that."""
    seconds = times * (RULE.step.seconds(2, 100) + chunk_s(*RULE, num_tokens))
    return MeasuredStep(2, 100, seconds, num_tokens, num_tokens**2 / 2)


def lengths(rule: LearnedChunkRule, times: float, num: int, decodes: StepDecodes = TWO) -> list[int]:
    """The chunks of so many steps, each of which takes `times` what the start says."""
    found = []
    for _ in range(num):
        found.append(rule.tokens(128, 512, decodes, 0))
        rule.note(mixed(found[-1], times))
    return found


def test_a_worker_as_quick_as_it_was_computes_as_before() -> None:
    rule = LearnedChunkRule(RULE)
    expected = RULE.tokens(128, 512, TWO, 0)
    assert expected == 176
    assert set(lengths(rule, 1.0, 50)) == {expected}


@pytest.mark.parametrize("times", [0.5, 1.5, 2.0])
def test_chunks_are_those_of_the_speed_that_is_measured(times: float) -> None:
    rule = LearnedChunkRule(RULE)
    found = lengths(rule, times, 60)
    assert found[0] == RULE.tokens(128, 512, TWO, 0)
    assert found[-1] == pytest.approx(RULE.slowed(times).tokens(128, 512, TWO, 0), abs=16)
    assert mixed(found[-1], times).seconds <= TWO.target_s


def test_the_old_length_comes_back_with_the_old_speed() -> None:
    rule = LearnedChunkRule(RULE)
    assert lengths(rule, 2.0, 60)[-1] < lengths(rule, 1.0, 100)[-1] == pytest.approx(176, abs=16)


def test_one_long_pause_changes_little() -> None:
    rule = LearnedChunkRule(RULE)
    rule.note(mixed(176, 50.0))
    assert rule.tokens(128, 512, TWO, 0) == 176
    rule = LearnedChunkRule(RULE)
    lengths(rule, 1.0, 20)
    rule.note(mixed(176, 50.0))
    assert lengths(rule, 1.0, 8)[-1] == pytest.approx(176, abs=16)


def test_a_worker_that_is_slow_now_and_then_meets_the_target_then_too() -> None:
    rule = LearnedChunkRule(RULE)
    times = ([1.0] * 30 + [1.4] * 6) * 20
    seconds = [mixed(lengths(rule, each, 1)[0], each).seconds for each in times]
    late = seconds[72:]  # it was slow twice
    assert sum(each > TWO.target_s for each in late) <= len(late) / 100
    assert max(late) <= 1.08 * TWO.target_s
    assert sum(late) / len(late) > 0.6 * TWO.target_s, "chunks are hardly shorter than they have to be"


def test_only_prompts_beside_decodes_say_how_long_these_take() -> None:
    rule = LearnedChunkRule(RULE)
    for step in (mixed(15, 3.0), mixed(200, 3.0)._replace(batch=0), mixed(0, 3.0), mixed(200, 0.0)):
        rule.note(step)
    assert rule.rule == RULE


def test_without_a_target_steps_stay_full_and_without_models_the_constant_holds() -> None:
    assert set(lengths(LearnedChunkRule(RULE), 3.0, 200, TWO._replace(target_s=math.inf))) == {510}
    assert set(lengths(LearnedChunkRule(CONSTANT_CHUNKS), 3.0, 20)) == {128}


@given(
    st.lists(
        st.tuples(st.integers(0, 600), st.integers(0, 64), st.just(0.0) | st.floats(1e-9, 1e4)), min_size=4, max_size=80
    )
)
def test_whatever_is_measured_a_chunk_is_neither_nothing_nor_more_than_fits(
    steps: list[tuple[int, int, float]],
) -> None:
    rule = LearnedChunkRule(RULE)
    for num_tokens, batch, seconds in steps:
        rule.note(MeasuredStep(batch, 50 * batch, seconds, num_tokens, num_tokens**2 / 2))
        assert 16 <= rule.tokens(128, 512, TWO, 0) <= 510
