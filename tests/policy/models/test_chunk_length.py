"""How many prompt tokens a step takes beside decodes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.chunk_length import (
    CONSTANT_CHUNKS,
    ChunkRule,
    StepDecodes,
    chunk_s,
    chunk_target_s,
    decodes_with_targets,
    step_decodes,
)
from halfmoon.policy.models.latency import PrefillModel, StepModel

RULE = ChunkRule(PrefillModel(0.01, 0.0005, 1e-7), StepModel(0.02, 0.001, 0.0))
TWO = StepDecodes(2, 100)


@pytest.mark.parametrize(
    ("target_s", "known_tokens", "expected"),
    [
        (math.inf, 0, 510),  # nobody set one: all that fits beside two decodes
        (0.1, 0, 128),  # 68 ms are left for what it adds: 134 tokens, rounded down
        (0.1, 10_000, 32),  # attention to what is known takes twice as long as all else
        (0.05, 0, 32),  # 23 ms are left: 45 tokens
        (0.001, 0, 16),  # a step of decodes alone misses it: an eighth of the constant
        (1.0, 0, 510),
    ],
)
def test_a_chunk_takes_what_the_target_leaves(target_s: float, known_tokens: int, expected: int) -> None:
    assert RULE.tokens(128, 512, TWO._replace(target_s=target_s), known_tokens) == expected


def test_the_constant_holds_where_nothing_is_known_of_models_or_targets() -> None:
    assert CONSTANT_CHUNKS.tokens(128, 512, TWO, 0) == 128
    assert ChunkRule(RULE.prefill).tokens(128, 512, TWO._replace(target_s=0.1), 0) == 128
    assert RULE.tokens(128, 512, decodes_with_targets(2, 100, (math.inf, None)), 0) == 128
    assert RULE.tokens(128, 512, decodes_with_targets(2, 100, (0.09, None, 9.0)), 0) == 112
    assert RULE.tokens(128, 512, decodes_with_targets(2, 100, (9.0, None)), 0) == 128


def test_a_decode_worker_keeps_the_constant_for_whoever_has_no_target() -> None:
    assert chunk_target_s(None, "both") == math.inf
    assert chunk_target_s(None, "decode") is None
    assert chunk_target_s(0.1, "decode") == chunk_target_s(0.1, "both") == 0.1
    for targets in ((), (None, 0.3), (0.2, math.inf), (0.4, 0.1)):
        for role in ("decode", "both"):
            alone = step_decodes(1, 10, targets, role)
            assert alone.with_one(5, chunk_target_s(0.2, role)) == step_decodes(2, 15, (*targets, 0.2), role)
            assert alone.with_one(5, chunk_target_s(None, role)) == step_decodes(2, 15, (*targets, None), role)


@given(
    st.floats(0, 0.1), st.floats(0, 0.01), st.floats(0, 1e-4), st.floats(1e-3, 10), st.integers(1, 64),
    st.integers(0, 10_000), st.integers(1, 1024), st.integers(1, 4096), st.booleans(),
)  # fmt: skip
def test_a_step_meets_the_target_unless_even_the_least_chunk_misses_it(
    a: float, b: float, c: float, target_s: float, batch: int, known: int, constant: int, whole: int, is_bounded: bool
) -> None:
    rule = ChunkRule(PrefillModel(a, b, c), StepModel(0.01, 1e-4, 1e-6))
    decodes = StepDecodes(batch, 100 * batch, target_s, is_bounded)
    num_tokens = rule.tokens(constant, whole, decodes, known)
    if not rule.is_known:
        assert num_tokens == constant
        return
    assert 1 <= num_tokens <= max(whole - batch, 1)
    if num_tokens > max(constant // 4, 1):
        step_s = rule.step.seconds(batch, 100 * batch) + chunk_s(*rule, num_tokens, known)
        assert step_s <= 0.9 * target_s * (1 + 1e-9)
        assert num_tokens <= constant or not is_bounded
