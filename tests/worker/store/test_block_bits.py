"""Sets of blocks as bits say what sets say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.worker.store.block_bits import bits_of, nth_in, numbers_in, span


@given(st.sets(st.integers(0, 300)), st.integers(0, 300), st.integers(0, 300))
def test_bits_are_a_set(blocks: set[int], first: int, end: int) -> None:
    bits = bits_of(blocks)
    assert numbers_in(bits) == sorted(blocks)
    assert bits.bit_count() == len(blocks)
    assert [nth_in(bits, number) for number in range(len(blocks))] == sorted(blocks)
    assert numbers_in(bits & span(first, end)) == sorted(blocks & set(range(first, end)))
