"""The DRAM tier: rooms of one arena for whole blocks and for those still arriving. No I/O, no clock.

A block is visible from `commit` on and never before. Rooms have users: the tier itself, and every reader; so what a
reader sees stays as it is whatever is evicted, dropped or replaced meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray
from typing_extensions import Buffer

from halfmoon.errors import DataLoss, NoCapacity, NotFound
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import KVBytes, KVLayout
from services.kvstore.catalog.block_identity import BlockMeta
from services.kvstore.catalog.catalog import Catalog
from services.kvstore.catalog.entry import Tier
from services.kvstore.tiers.allocator import rounded_bytes
from services.kvstore.tiers.arena import Arena, Room

RETRY_AFTER_MS = 100  # drafts are short-lived: they commit, or their senders' leases end

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One whole block in the arena. Who got it from `acquire` gives it back with `release`."""

    meta: BlockMeta
    codec: EntryCodec
    room: Room
    digest: int  # xxh3-64 of the room's bytes


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A block on its way in, raw. Its owner ends it with `commit` or `discard`."""

    meta: BlockMeta
    layout: KVLayout
    room: Room
    held: bytes | None  # the block before it, unless that is on its way, too

    def write(self, part: KVRange, payload: Buffer) -> None:
        """Puts `payload` (canonical order) at `part`, which counts tokens from the block's first."""
        into = cells(self.room.view, self.layout, part)
        into[...] = np.frombuffer(memoryview(payload), dtype=np.uint8).reshape(into.shape)


class DramTier:
    """Owns the rooms of blocks and drafts. Which block goes when is the catalog's."""

    def __init__(self, memory: memoryview, catalog: Catalog) -> None:
        self._arena = Arena(memory)
        self._catalog = catalog
        self._blocks: dict[bytes, Block] = {}
        self._drafts: dict[int, Draft] = {}  # by id(): two senders may bring the same block at once
        self.reserved_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """The whole arena."""
        return self._arena.capacity_bytes

    def reserve(self, meta: BlockMeta, after: Draft | None = None) -> Draft:
        """Makes room for one block, evicting others if it must; what comes before it is held until the draft ends.

        Where that is still on its way it is `after`, and has to be committed first. Raises NotFound if it is not here,
        NoCapacity: for ever when the block is larger than the arena, else until drafts and readers end, with
        `retry_after_ms`.
        """
        assert meta.layout is not None
        assert after is None or after.meta.id == meta.parent
        if after is None:
            self._check_parent(meta)
        held = meta.parent if after is None else None
        if held is not None:
            self._catalog.hold(held)
        try:
            room = self._room(meta.layout.block_bytes)
        except NoCapacity:
            if held is not None:
                self._catalog.release(held)
            raise
        draft = Draft(meta, meta.layout, room, held)
        self._drafts[id(draft)] = draft
        self.reserved_bytes += room.view.nbytes
        return draft

    def commit(self, draft: Draft, known_digest: int | None = None) -> None:
        """Makes the block visible, as the most recently used. Raises NotFound if what comes before it has gone.

        known_digest: of the draft's bytes, where somebody has checked it.
        """
        self._check_parent(draft.meta)
        self._arena.retain(draft.room)
        self.discard(draft)
        self._enter(draft.meta, EntryCodec(), draft.room, known_digest)

    def commit_encoded(self, draft: Draft, codec: EntryCodec, payload: KVBytes) -> None:
        """As `commit`, in other bytes than arrived."""
        self._check_parent(draft.meta)
        self.discard(draft)
        self.insert(draft.meta, codec, payload)

    def insert(self, meta: BlockMeta, codec: EntryCodec, payload: KVBytes) -> None:
        """A whole block at once. Raises as `reserve` does."""
        self._check_parent(meta)
        if meta.parent is not None:
            self._catalog.hold(meta.parent)
        try:
            room = self._room(memoryview(payload).nbytes)
        finally:
            self._release_parent(meta)
        room.view[:] = memoryview(payload).cast("B")
        self._enter(meta, codec, room)

    def discard(self, draft: Draft) -> None:
        """Ends a draft. Ending it twice does nothing."""
        if self._drafts.pop(id(draft), None) is not None:
            self.reserved_bytes -= draft.room.view.nbytes
            self._arena.release(draft.room)
            if draft.held is not None:
                self._catalog.release(draft.held)

    def acquire(self, block: bytes, use: bool = True) -> Block:
        """The block, held, and used unless the store itself reads it.

        Raises NotFound; DataLoss if it went bad, and then it is no more in this tier.
        """
        found = self._blocks.get(block)
        if found is None:
            raise NotFound("no block with this key is here")
        if digest(found.room.view) != found.digest:
            self._catalog.lose(block, Tier.DRAM)
            raise DataLoss("a stored block's digest did not match; it was dropped")
        self._arena.retain(found.room)
        self._catalog.hold(block)
        if use:
            self._catalog.touch(block)
        return found

    def release(self, block: Block) -> None:
        """Ends one use."""
        self._arena.release(block.room)
        self._catalog.release(block.meta.id)

    def forget(self, block: bytes) -> None:
        """The catalog says that the block has left this tier."""
        self._arena.release(self._blocks.pop(block).room)

    def check_integrity(self) -> None:
        """For tests, when nobody reads."""
        self._arena.check_integrity()
        rooms = [block.room for block in self._blocks.values()] + [draft.room for draft in self._drafts.values()]
        assert sum(rounded_bytes(room.view.nbytes) for room in rooms) == self.capacity_bytes - self._arena.free_bytes
        assert set(self._blocks) == {entry.meta.id for entry in self._catalog if Tier.DRAM in entry.tiers}

    def _enter(self, meta: BlockMeta, codec: EntryCodec, room: Room, known_digest: int | None = None) -> None:
        before = self._blocks.get(meta.id)
        self._blocks[meta.id] = Block(meta, codec, room, digest(room.view) if known_digest is None else known_digest)
        self._catalog.add(meta, Tier.DRAM, room.view.nbytes)
        if before is not None:
            self._arena.release(before.room)

    def _check_parent(self, meta: BlockMeta) -> None:
        if not self._catalog.can_add(meta.parent, Tier.DRAM):
            raise NotFound("the block before this one is not here", param="parent")

    def _release_parent(self, meta: BlockMeta) -> None:
        if meta.parent is not None:
            self._catalog.release(meta.parent)

    def _room(self, num_bytes: int) -> Room:
        if num_bytes > self.capacity_bytes:
            raise NoCapacity(f"a block of {num_bytes} bytes is over the whole budget of {self.capacity_bytes}")
        while (room := self._arena.allocate(num_bytes)) is None:
            if self._catalog.pop_victim(Tier.DRAM) is None:
                raise NoCapacity(
                    "blocks still arriving, being read or pinned take all of the budget", retry_after_ms=RETRY_AFTER_MS
                )
        return room


def cells(view: memoryview, layout: KVLayout, part: KVRange) -> Bytes:
    """The named cells of one raw block, `part` counting tokens from its first."""
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_tokens, layout.head_dim * layout.item_bytes)
    tokens = slice(part.token_start, part.token_start + part.num_tokens)
    whole = np.frombuffer(view, np.uint8).reshape(shape)
    return whole[part.layer_start : part.layer_end, :, part.head_start : part.head_end, tokens]


def digest(view: KVBytes) -> int:
    """xxh3-64."""
    return xxhash.xxh3_64_intdigest(view)
