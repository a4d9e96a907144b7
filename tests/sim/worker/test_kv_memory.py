"""KV memory against a plain model of it: counts add up, and the least recently used idle block goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.sim.worker.kv_memory import KvMemory

NUM_BLOCKS, SIZE = 12, 2


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True), st.booleans()), max_size=40)
)
def test_blocks_are_free_in_use_or_idle_and_never_lost(steps: list[tuple[list[int], bool]]) -> None:
    kv = KvMemory(NUM_BLOCKS, SIZE, is_cache=True)
    users: list[tuple[list[int], int]] = []  # referenced prefix blocks, and own blocks
    for prefix, is_ending in steps:
        if is_ending and users:
            referenced, own = users.pop(0)
            kv.give(own)
            kv.release(referenced)
        matched = kv.match(prefix, len(prefix))
        assert matched == prefix[: len(matched)]
        need = (len(prefix) - len(matched)) * SIZE + 1
        if need > kv.available:
            kv.release(matched)
        else:
            kv.take(need)
            new = kv.insert(prefix[len(matched) :])
            users.append((matched + new, need - len(new) * SIZE))
        cached = {block_id for referenced, _ in users for block_id in referenced}
        in_use = len(cached) * SIZE + sum(own for _, own in users)
        assert kv.available == NUM_BLOCKS - in_use
        assert 0 <= kv.free <= kv.available
        assert kv.peak_blocks >= in_use
    for referenced, own in users:
        kv.give(own)
        kv.release(referenced)
    assert kv.available == NUM_BLOCKS


def test_the_end_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    kv = KvMemory(6, 1, is_cache=True)
    for prefix in ([1, 2, 3], [4, 5, 6]):
        kv.take(3)
        kv.release(kv.insert(prefix))
    kv.release(kv.match([1], 1))  # used again: the newest now
    kv.take(1)
    assert kv.match([1, 2, 3], 3) == [1, 2]
    assert kv.match([4, 5, 6], 3) == [4, 5, 6]


def test_changes_since_the_last_report_cancel_out() -> None:
    kv = KvMemory(2, 1, is_cache=True)
    kv.take(1)
    kv.release(kv.insert([7]))
    assert kv.take_changes() == ([7], [])
    kv.take(2)  # evicts 7
    kv.give(1)
    kv.take(1)
    kv.release(kv.insert([7]))
    assert kv.take_changes() == ([], [])


def test_a_worker_without_a_cache_finds_and_keeps_nothing() -> None:
    kv = KvMemory(4, 1, is_cache=False)
    kv.take(2)
    assert kv.insert([1, 2]) == []
    assert kv.match([1, 2], 2) == []
