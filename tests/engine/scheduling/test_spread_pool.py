"""Blocks of several ranks: stripes for long prompts, one rank for short ones, nothing lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.engine.scheduling.spread_pool import SpreadPool, own_id, rank_of
from halfmoon.errors import NoCapacity


def ranks_of(blocks: list[int], num_ranks: int) -> list[int]:
    return [rank_of(block, num_ranks) for block in blocks]


def test_long_prompts_go_to_the_ranks_in_turn_and_short_ones_to_the_emptiest() -> None:
    pool = SpreadPool(3, 10, long_blocks=4)
    long = pool.allocate(7)
    assert ranks_of(long, 3) == [0, 1, 2, 0, 1, 2, 0]
    assert [own_id(block, 3) for block in long] == [0, 0, 0, 1, 1, 1, 2], "neighbours on a rank are not adjacent"
    short = pool.allocate(4)
    assert ranks_of(short, 3) == [1] * 4
    assert ranks_of(pool.allocate(1, near=short[-1]), 3) == [1], "a decode leaves its rank"
    assert ranks_of(pool.allocate(5, near=short[-1]), 3) == [2, 0, 1, 2, 0], "what follows a cached prefix is spread"


def test_a_full_rank_costs_no_capacity() -> None:
    pool = SpreadPool(2, 4, long_blocks=2)
    first = pool.allocate(2)
    assert ranks_of(pool.allocate(6), 2) == [1, 0, 1, 0, 1, 1]
    with pytest.raises(NoCapacity, match="1 blocks are wanted, 0 of 8 are free"):
        pool.allocate(1)
    pool.release(first)
    assert set(pool.allocate(2)) == set(first)


@given(st.integers(1, 4), st.integers(1, 6), st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 5))))
def test_each_block_is_given_once_and_stripes_are_even(
    num_ranks: int, long_blocks: int, calls: list[tuple[int, bool, int]]
) -> None:
    pool = SpreadPool(num_ranks, 8, long_blocks)
    held: list[list[int]] = []
    for num_blocks, releases, room in calls:
        if releases and held:
            pool.release(held.pop(0))
        used = Counter(ranks_of([block for blocks in held for block in blocks], num_ranks))
        left = [8 - used[rank] for rank in range(num_ranks)]
        if num_blocks > pool.num_free:
            with pytest.raises(NoCapacity):
                pool.allocate(num_blocks)
            continue
        near = held[-1][-1] if held and held[-1] else None
        blocks = pool.allocate(num_blocks, near, room)
        counts = Counter(ranks_of(blocks, num_ranks))
        if num_blocks > long_blocks and min(left) >= -(-num_blocks // num_ranks):
            assert max(counts.values()) - min(counts[rank] for rank in range(num_ranks)) <= 1
        held.append(blocks)
        everything = [block for blocks in held for block in blocks]
        assert len(set(everything)) == len(everything)
        assert all(0 <= block < pool.num_blocks and pool.references(block) == 1 for block in everything)
        assert pool.num_free == pool.num_blocks - len(everything)
        pool.check_integrity()
