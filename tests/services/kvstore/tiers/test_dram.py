"""The DRAM tier against a plain model of it, and its laws one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from halfmoon.catalog.block_identity import BlockMeta, block_id
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Change, Tier
from halfmoon.errors import DataLoss, NoCapacity, NotFound
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.policy.eviction import policy_named
from services.kvstore.tiers.dram import Block, Draft, DramTier, cells

SMALL = KVLayout(2, 1, 4, "float16", 2)  # 64 bytes a block
LARGE = KVLayout(2, 2, 4, "float16", 4)  # 256 bytes a block
IDS = [block_id(bytes([i]) * 16) for i in range(6)]


def whole(layout: KVLayout) -> KVRange:
    return KVRange(0, layout.num_layers, 0, layout.num_kv_heads, 0, layout.block_tokens)


def content(layout: KVLayout, seed: int) -> bytes:
    return bytes((seed + i) % 256 for i in range(layout.block_bytes))


def dram(num_bytes: int) -> tuple[DramTier, Catalog]:
    def on_change(change: Change) -> None:
        if not change.held:
            tier.forget(change.block)

    catalog = Catalog({Tier.DRAM: policy_named("lru")}, on_change)
    tier = DramTier(memoryview(bytearray(num_bytes)), catalog)
    return tier, catalog


def put(tier: DramTier, block: bytes, layout: KVLayout = SMALL, seed: int = 0, parent: bytes | None = None) -> None:
    draft = tier.reserve(BlockMeta(block, parent, 0 if parent is None else 1, layout))
    draft.write(whole(layout), content(layout, seed))
    tier.commit(draft)


def read(tier: DramTier, block: bytes) -> bytes:
    found = tier.acquire(block)
    data = bytes(found.room.view)
    tier.release(found)
    return data


class DramMachine(RuleBasedStateMachine):
    """What is here is right, readers keep what they have, and what had to go is the longest unused."""

    drafts = Bundle("drafts")
    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.tier, self.catalog = dram(6 * LARGE.block_bytes)
        self.model: dict[bytes, bytes] = {}  # insertion order is order of use
        self.held: list[bytes] = []

    def forget_evicted(self) -> None:
        gone = [block for block in self.model if block not in self.catalog]
        may_go = [block for block in self.model if block not in self.held]
        assert gone == may_go[: len(gone)]
        for block in gone:
            del self.model[block]

    @rule(target=drafts, block=st.sampled_from(IDS), layout=st.sampled_from([SMALL, LARGE]), seed=st.integers(0, 255))
    def reserve(self, block: bytes, layout: KVLayout, seed: int) -> tuple[Draft, bytes] | None:
        try:
            draft = self.tier.reserve(BlockMeta(block, layout=layout))
        except NoCapacity:
            return None
        finally:
            self.forget_evicted()
        draft.write(whole(layout), content(layout, seed))
        return draft, content(layout, seed)

    @rule(ended=consumes(drafts))
    def commit(self, ended: tuple[Draft, bytes] | None) -> None:
        if ended is not None:
            self.tier.commit(ended[0])
            self.model.pop(ended[0].meta.id, None)
            self.model[ended[0].meta.id] = ended[1]

    @rule(ended=consumes(drafts))
    def discard(self, ended: tuple[Draft, bytes] | None) -> None:
        if ended is not None:
            self.tier.discard(ended[0])
            self.tier.discard(ended[0])

    @rule(target=readers, block=st.sampled_from(IDS))
    def acquire(self, block: bytes) -> tuple[Block, bytes] | None:
        if block not in self.model:
            with pytest.raises(NotFound):
                self.tier.acquire(block)
            return None
        self.model[block] = self.model.pop(block)
        self.held.append(block)
        return self.tier.acquire(block), self.model[block]

    @rule(ended=consumes(readers))
    def release(self, ended: tuple[Block, bytes] | None) -> None:
        if ended is not None:
            assert bytes(ended[0].room.view) == ended[1], "overwritten under its reader"
            self.tier.release(ended[0])
            self.held.remove(ended[0].meta.id)

    @rule(block=st.sampled_from(IDS))
    def drop(self, block: bytes) -> None:
        if block not in self.held:
            assert self.catalog.drop(block) == (self.model.pop(block, None) is not None)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.catalog.check_integrity()
        assert {entry.meta.id for entry in self.catalog} == set(self.model)
        if not self.held:
            self.tier.check_integrity()
        for block, data in self.model.items():
            found = self.tier.acquire(block, use=False)
            assert bytes(found.room.view) == data
            self.tier.release(found)


DramMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestDram = DramMachine.TestCase


def test_a_block_is_invisible_until_it_is_whole() -> None:
    tier, catalog = dram(1024)
    draft = tier.reserve(BlockMeta(IDS[0], layout=SMALL))
    draft.write(whole(SMALL), content(SMALL, 1))
    assert IDS[0] not in catalog
    with pytest.raises(NotFound):
        tier.acquire(IDS[0])
    tier.commit(draft)
    assert read(tier, IDS[0]) == content(SMALL, 1)


def test_a_corrupted_block_is_dropped_and_never_served() -> None:
    tier, catalog = dram(1024)
    put(tier, IDS[0])
    put(tier, IDS[1], parent=IDS[0])
    block = tier.acquire(IDS[0])
    block.room.view[5] ^= 1
    tier.release(block)
    with pytest.raises(DataLoss):
        tier.acquire(IDS[0])
    assert [entry.meta.id for entry in catalog] == [IDS[1]], "what follows it may be of use again"
    tier.check_integrity()


def test_a_block_over_the_whole_arena_can_never_come() -> None:
    tier, catalog = dram(SMALL.block_bytes)
    put(tier, IDS[0])
    with pytest.raises(NoCapacity) as caught:
        tier.reserve(BlockMeta(IDS[1], layout=LARGE))
    assert caught.value.retry_after_ms is None
    assert IDS[0] in catalog, "nothing was evicted for it"


def test_the_newer_bytes_of_a_key_win_and_readers_of_the_older_keep_them() -> None:
    tier, _ = dram(4 * SMALL.block_bytes)
    put(tier, IDS[0], seed=1)
    older = tier.acquire(IDS[0])
    put(tier, IDS[0], seed=2)
    assert read(tier, IDS[0]) == content(SMALL, 2)
    assert bytes(older.room.view) == content(SMALL, 1)
    tier.release(older)
    tier.check_integrity()


def test_a_draft_holds_what_comes_before_it() -> None:
    tier, catalog = dram(2 * SMALL.block_bytes)
    put(tier, IDS[0])
    draft = tier.reserve(BlockMeta(IDS[1], IDS[0], 1, SMALL))
    with pytest.raises(NoCapacity) as caught:
        tier.reserve(BlockMeta(IDS[2], layout=SMALL))
    assert caught.value.retry_after_ms is not None
    tier.commit(draft)
    put(tier, IDS[2])
    assert (IDS[0] in catalog, IDS[1] in catalog) == (True, False), "the end goes first"


def test_a_block_whose_beginning_is_dropped_while_it_arrives_does_not_come() -> None:
    tier, catalog = dram(1024)
    put(tier, IDS[0])
    draft = tier.reserve(BlockMeta(IDS[1], IDS[0], 1, SMALL))
    catalog.drop(IDS[0])
    with pytest.raises(NotFound):
        tier.commit(draft)
    tier.discard(draft)
    tier.check_integrity()


def test_blocks_may_be_kept_in_other_bytes_than_arrived() -> None:
    tier, _ = dram(1024)
    draft = tier.reserve(BlockMeta(IDS[0], layout=SMALL))
    tier.commit_encoded(draft, EntryCodec.parse("int8"), b"short")
    found = tier.acquire(IDS[0])
    assert (bytes(found.room.view), str(found.codec), tier.reserved_bytes) == (b"short", "int8", 0)
    tier.release(found)
    tier.check_integrity()


def test_parts_are_the_canonical_cells() -> None:
    data = content(LARGE, 7)
    rows = np.frombuffer(data, dtype=np.uint8).reshape(2, 2, 2, 4, 8)
    assert np.array_equal(cells(memoryview(data), LARGE, KVRange(1, 2, 1, 2, 1, 2)), rows[1:2, :, 1:2, 1:3])
