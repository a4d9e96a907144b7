"""Prompts of a replay share tokens exactly where the trace shares blocks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.replay.prompts import Prompts
from halfmoon.sim.workloads.workload import Prefixes, Workload

BLOCK = 16


def workload(prompts: list[tuple[list[int], int]]) -> Workload:
    """Of (ids of blocks, tokens after the last one)."""
    lengths = np.array([max(len(ids) * BLOCK + more, 1) for ids, more in prompts])
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in prompts])])
    ids = np.array([one for ids, _ in prompts for one in ids], dtype=np.int64)
    ones = np.ones(len(prompts), dtype=np.int64)
    return Workload(np.zeros(len(prompts)), lengths, ones, Prefixes(BLOCK, ids, offsets))


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=4), st.integers(-BLOCK + 1, 2 * BLOCK)), min_size=2, max_size=6
    )
)
def test_blocks_are_equal_where_their_ids_are(prompts: list[tuple[list[int], int]]) -> None:
    made = Prompts(workload(prompts))
    found = [made.of(index) for index in range(len(prompts))]
    assert [len(one) for one in found] == [max(len(ids) * BLOCK + more, 1) for ids, more in prompts]
    for (one, one_tokens), (two, two_tokens) in pairwise(zip((ids for ids, _ in prompts), found, strict=True)):
        for place in range(min(len(one), len(two))):
            start, end = place * BLOCK, (place + 1) * BLOCK
            if end <= min(len(one_tokens), len(two_tokens)):
                is_equal = bool((one_tokens[start:end] == two_tokens[start:end]).all())
                assert is_equal == (one[place] == two[place])


def test_what_follows_the_blocks_is_a_request_s_own() -> None:
    made = Prompts(workload([([7], 40), ([7], 40)]))
    first, second = made.of(0), made.of(1)
    assert (first[:BLOCK] == second[:BLOCK]).all()
    assert (first[BLOCK:] != second[BLOCK:]).any()
    assert (made.of(0) == first).all()
