"""How often prefixes are asked for, and where."""

from __future__ import annotations

import numpy as np
import pytest

from halfmoon.policy.view.hot_prefixes import HALF_LIFE_S, HotPrefixes

KEYS = np.array([11, 12, 13, 14], dtype=np.uint64)


def cached(*blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(blocks, dtype=np.int64)


def test_uses_are_counted_by_the_longest_known_prefix_and_the_rarest_is_forgotten() -> None:
    prefixes = HotPrefixes(limit=2)
    for depth in (1, 3, 3, 2):
        prefixes.note(KEYS, cached(depth, depth, 0), 64, 0.0)
    prefixes.note(KEYS, cached(0, 0), 64, 0.0)  # nothing is known of it
    told = [(one.num_tokens, one.num_uses, one.num_holders) for one in prefixes.hottest(9, 0.0)]
    assert told == [(192, 2, 2), (128, 1, 2)]
    prefixes.note(KEYS, cached(9, 0), 64, 0.0)  # no more than the prompt has
    assert len(prefixes.hottest(9, 0.0)) == 2


def test_a_use_counts_half_after_the_half_life() -> None:
    prefixes = HotPrefixes()
    for _ in range(4):
        prefixes.note(KEYS, cached(3), 64, 10.0)
    assert prefixes.hottest(1, 10.0 + 2 * HALF_LIFE_S)[0].num_uses == pytest.approx(1)
    prefixes.note(KEYS, cached(3), 64, 10.0 + HALF_LIFE_S)
    assert prefixes.hottest(1, 10.0 + HALF_LIFE_S)[0].num_uses == pytest.approx(3)


def test_the_pool_of_stores_is_no_holder_of_its_own() -> None:
    prefixes = HotPrefixes()
    prefixes.note(KEYS, cached(3, 3, 0, 3), 64, 0.0, pool=1)
    assert prefixes.hottest(1, 0.0)[0].num_holders == 2


def test_uses_near_each_store_are_counted_apart() -> None:
    prefixes = HotPrefixes()
    assert prefixes.note(KEYS, cached(3), 64, 0.0, "a:1") == 1
    assert prefixes.note(KEYS, cached(3), 64, 0.0, "b:1") == 1
    assert prefixes.note(KEYS, cached(3), 64, HALF_LIFE_S, "a:1") == pytest.approx(1.5)
    assert prefixes.note(KEYS, cached(3), 64, HALF_LIFE_S) == pytest.approx(3.0), "near none: all of them"
    assert prefixes.note(KEYS, cached(2), 64, HALF_LIFE_S, "a:1") == 1, "another prefix"
