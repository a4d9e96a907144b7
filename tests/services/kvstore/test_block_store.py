"""The DRAM tier against a plain model of it, and its laws one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from halfmoon.errors import DataLoss, Incompatible, InvalidRequest, NoCapacity, NotFound
from halfmoon.kv.frame import KVRange
from halfmoon.kv.layout import KVLayout
from services.kvstore.store import BlockStore, Draft

SMALL = KVLayout(2, 1, 2, "float16", 2)  # 32 bytes a block
LARGE = KVLayout(2, 2, 2, "float16", 4)  # 128 bytes a block
KEYS = [bytes([i]) * 16 for i in range(6)]


def whole(layout: KVLayout) -> KVRange:
    return KVRange(0, layout.num_layers, 0, layout.num_kv_heads, 0, layout.block_tokens)


def content(layout: KVLayout, seed: int) -> bytes:
    return bytes((seed + i) % 256 for i in range(layout.block_bytes))


def put(store: BlockStore, key: bytes, layout: KVLayout = SMALL, seed: int = 0) -> None:
    draft = store.reserve(key, layout)
    draft.write(whole(layout), content(layout, seed))
    store.commit(draft)


def read(store: BlockStore, key: bytes) -> bytes:
    block = store.get(key)
    return block.part(whole(block.layout))


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of calls leaves the store as a list of (key, bytes) in order of use would be."""

    BUDGET = 5 * SMALL.block_bytes
    drafts = Bundle("drafts")

    def __init__(self) -> None:
        super().__init__()
        self.store = BlockStore(self.BUDGET)
        self.model: dict[bytes, tuple[KVLayout, bytes]] = {}  # insertion order is order of use
        self.open: list[Draft] = []

    @property
    def reserved(self) -> int:
        return sum(draft.layout.block_bytes for draft in self.open)

    @property
    def used(self) -> int:
        return sum(layout.block_bytes for layout, _ in self.model.values())

    @rule(target=drafts, key=st.sampled_from(KEYS), layout=st.sampled_from([SMALL, LARGE]), seed=st.integers(0, 255))
    def reserve(self, key: bytes, layout: KVLayout, seed: int) -> tuple[Draft | None, int]:
        if key in self.model and self.model[key][0] != layout:
            with pytest.raises(Incompatible):
                self.store.reserve(key, layout)
            return None, seed
        if layout.block_bytes + self.reserved > self.BUDGET:
            with pytest.raises(NoCapacity) as caught:
                self.store.reserve(key, layout)
            assert caught.value.retry_after_ms is not None
            return None, seed
        while layout.block_bytes + self.reserved + self.used > self.BUDGET:
            del self.model[next(iter(self.model))]
        draft = self.store.reserve(key, layout)
        draft.write(whole(layout), content(layout, seed))
        self.open.append(draft)
        return draft, seed

    @rule(ended=consumes(drafts))
    def commit(self, ended: tuple[Draft | None, int]) -> None:
        draft, seed = ended
        if draft is None:
            return
        self.store.commit(draft)
        self.open.remove(draft)
        self.model.pop(draft.key, None)
        self.model[draft.key] = draft.layout, content(draft.layout, seed)

    @rule(ended=consumes(drafts))
    def discard(self, ended: tuple[Draft | None, int]) -> None:
        if ended[0] is None:
            return
        self.store.discard(ended[0])
        self.store.discard(ended[0])
        self.open.remove(ended[0])

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: bytes) -> None:
        if key not in self.model:
            with pytest.raises(NotFound):
                self.store.get(key)
            return
        self.model[key] = self.model.pop(key)
        assert read(self.store, key) == self.model[key][1]

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def match(self, keys: list[bytes]) -> None:
        matched = next((i for i, key in enumerate(keys) if key not in self.model), len(keys))
        assert self.store.match(keys) == matched
        for key in reversed(keys[:matched]):
            self.model[key] = self.model.pop(key)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=2, unique=True))
    def delete(self, keys: list[bytes]) -> None:
        assert self.store.delete(keys) == sum(self.model.pop(key, None) is not None for key in keys)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.store.check_integrity()
        stats = self.store.stats()
        assert (stats.num_blocks, stats.used_bytes, stats.reserved_bytes) == (len(self.model), self.used, self.reserved)


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStore = StoreMachine.TestCase


def test_a_block_is_invisible_until_it_is_whole() -> None:
    store = BlockStore(1000)
    draft = store.reserve(KEYS[0], SMALL)
    draft.write(whole(SMALL), content(SMALL, 1))
    assert store.match(KEYS[:1]) == 0
    with pytest.raises(NotFound):
        store.get(KEYS[0])
    store.commit(draft)
    assert store.match(KEYS[:1]) == 1
    assert read(store, KEYS[0]) == content(SMALL, 1)


def test_a_corrupted_block_is_dropped_and_never_served() -> None:
    store = BlockStore(1000)
    put(store, KEYS[0])
    data = store.get(KEYS[0]).data
    data.flags.writeable = True
    data[1, 0, 0, 1, 3] ^= 1
    with pytest.raises(DataLoss):
        store.get(KEYS[0])
    with pytest.raises(NotFound):
        store.get(KEYS[0])
    stats = store.stats()
    assert (stats.num_corrupted_total, stats.num_blocks, stats.used_bytes) == (1, 0, 0)


def test_the_least_recently_used_goes_first() -> None:
    store = BlockStore(3 * SMALL.block_bytes)
    for key in KEYS[:3]:
        put(store, key)
    store.get(KEYS[0])
    put(store, KEYS[3])
    assert [store.match([key]) for key in KEYS[:4]] == [1, 0, 1, 1]
    assert store.stats().num_evicted_total == 1


def test_the_head_of_a_matched_chain_outlives_its_tail() -> None:
    store = BlockStore(3 * SMALL.block_bytes)
    for key in KEYS[:3]:
        put(store, key)
    assert store.match(KEYS[:4]) == 3
    put(store, KEYS[5])
    assert store.match(KEYS[:3]) == 2


def test_match_stops_at_the_first_gap() -> None:
    store = BlockStore(1000)
    put(store, KEYS[0])
    put(store, KEYS[2])
    assert store.match(KEYS[:3]) == 1


def test_a_block_over_the_whole_budget_can_never_come() -> None:
    store = BlockStore(SMALL.block_bytes)
    put(store, KEYS[0])
    with pytest.raises(NoCapacity) as caught:
        store.reserve(KEYS[1], LARGE)
    assert caught.value.retry_after_ms is None
    assert store.match(KEYS[:1]) == 1, "nothing was evicted for it"


def test_the_newer_bytes_of_a_key_win() -> None:
    store = BlockStore(2 * SMALL.block_bytes)
    put(store, KEYS[0], seed=1)
    put(store, KEYS[0], seed=2)
    assert read(store, KEYS[0]) == content(SMALL, 2)
    assert store.stats().num_blocks == 1


def test_parts_are_the_canonical_cells() -> None:
    store = BlockStore(1000)
    put(store, KEYS[0], LARGE, seed=7)
    cells = np.frombuffer(content(LARGE, 7), dtype=np.uint8).reshape(2, 2, 2, 4, 4)
    part = KVRange(1, 2, 1, 2, 1, 2)
    assert store.get(KEYS[0]).part(part) == cells[1:2, :, 1:2, 1:3].tobytes()


@pytest.mark.parametrize("key", [b"", b"k" * 15, b"k" * 17])
def test_only_keys_are_keys(key: bytes) -> None:
    store = BlockStore(1000)
    for use in (lambda: store.reserve(key, SMALL), lambda: store.get(key), lambda: store.match([key])):
        with pytest.raises(InvalidRequest):
            use()


def test_counters() -> None:
    store = BlockStore(1000)
    put(store, KEYS[0])
    store.get(KEYS[0])
    with pytest.raises(NotFound):
        store.get(KEYS[1])
    stats = store.stats()
    assert (stats.num_stored_total, stats.num_hits_total, stats.num_misses_total) == (1, 1, 1)
