"""The DRAM tier: rooms of one arena for whole and for arriving blocks. No I/O, no clock.

A block is visible from `commit` on and never before. Rooms have users: the tier itself and every reader. So a reader's
bytes stay unchanged even if the block is evicted, dropped or replaced meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray
from typing_extensions import Buffer

from halfmoon.catalog.block_identity import BlockMeta
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Tier
from halfmoon.errors import DataLoss, InvalidRequest, NoCapacity, NotFound
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import KVBytes, KVLayout
from services.kvstore.tiers.allocator import rounded_bytes
from services.kvstore.tiers.arena import Arena, Room

RETRY_AFTER_MS = 100  # drafts are short-lived: they commit, or their senders' leases end

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One whole block in the arena. Callers of `acquire` return it with `release`."""

    meta: BlockMeta
    codec: EntryCodec
    room: Room
    digest: int  # xxh3-64 of the room's bytes


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """An arriving block, raw. Its owner ends it with `commit` or `discard`."""

    meta: BlockMeta
    layout: KVLayout
    room: Room
    held: bytes | None  # the predecessor, unless that is still arriving too, or elsewhere
    is_joined: bool  # whether the predecessor is here or arriving

    def write(self, part: KVRange, payload: Buffer) -> None:
        """Writes `payload` (canonical order) at `part`, whose tokens count from the block's first."""
        into = cells(self.room.view, self.layout, part)
        into[...] = np.frombuffer(memoryview(payload), dtype=np.uint8).reshape(into.shape)


class DramTier:
    """Owns the rooms of blocks and drafts. The catalog decides which block is evicted when."""

    def __init__(self, memory: memoryview, catalog: Catalog) -> None:
        self._arena = Arena(memory)
        self._catalog = catalog
        self._blocks: dict[bytes, Block] = {}
        self._drafts: dict[int, Draft] = {}  # by id(): two senders may bring the same block at once
        self.reserved_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """Size of the whole arena."""
        return self._arena.capacity_bytes

    def reserved_bytes_of(self, tenant: str) -> int:
        """Bytes of the tenant's arriving blocks."""
        return sum(draft.room.view.nbytes for draft in self._drafts.values() if draft.meta.tenant == tenant)

    def reserve(self, meta: BlockMeta, after: Draft | None = None) -> Draft:
        """Reserves room for one block, evicting others if needed; holds its predecessor until the draft ends.

        A predecessor that is still arriving is passed as `after` and must be committed first. One that is not here is
        elsewhere in the pool. Raises NoCapacity: for good if the block is larger than the arena, otherwise with
        `retry_after_ms`, until drafts and readers end.
        """
        assert meta.layout is not None
        assert after is None or after.meta.id == meta.parent
        held = meta.parent if after is None and meta.parent in self._catalog else None
        if held is not None:
            self._catalog.hold(held)
        try:
            room = self._room(meta.layout.block_bytes)
        except NoCapacity:
            if held is not None:
                self._catalog.release(held)
            raise
        draft = Draft(meta, meta.layout, room, held, after is not None or held is not None)
        self._drafts[id(draft)] = draft
        self.reserved_bytes += room.view.nbytes
        return draft

    def commit(self, draft: Draft, known_digest: int | None = None) -> None:
        """Makes the block visible as the most recently used. Raises NotFound if its predecessor was dropped meanwhile,
        InvalidRequest if the block would come before itself.

        known_digest: digest of the draft's bytes if it has been checked.
        """
        self._check_joined(draft)
        self._arena.retain(draft.room)
        self.discard(draft)
        self._enter(draft.meta, EntryCodec(), draft.room, known_digest)

    def commit_encoded(self, draft: Draft, codec: EntryCodec, payload: KVBytes) -> None:
        """Commits a block whose encoded bytes differ from those that arrived."""
        self._check_joined(draft)
        self.discard(draft)
        self.insert(draft.meta, codec, payload)

    def insert(self, meta: BlockMeta, codec: EntryCodec, payload: KVBytes) -> None:
        """Inserts a whole block at once. Raises the errors of `reserve`."""
        held = meta.parent if meta.parent in self._catalog else None
        if held is not None:
            self._catalog.hold(held)
        try:
            room = self._room(memoryview(payload).nbytes)
        finally:
            if held is not None:
                self._catalog.release(held)
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
        """Gives the block to a reader and holds it. `use` is False when the store itself reads it.

        Raises NotFound; DataLoss if the block is damaged, after removing it from this tier.
        """
        stored = self._blocks.get(block)
        if stored is None:
            raise NotFound("no block with this key is here")
        if digest(stored.room.view) != stored.digest:
            self._catalog.lose(block, Tier.DRAM)
            raise DataLoss("a stored block's digest did not match; it was dropped")
        self._arena.retain(stored.room)
        self._catalog.hold(block)
        if use:
            self._catalog.touch(block)
        return stored

    def release(self, block: Block) -> None:
        """Ends one use."""
        self._arena.release(block.room)
        self._catalog.release(block.meta.id)

    def forget(self, block: bytes) -> None:
        """Notes that the block has left this tier according to the catalog."""
        self._arena.release(self._blocks.pop(block).room)

    def check_integrity(self) -> None:
        """Asserts the invariants. For tests, without concurrent reads."""
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

    def _check_joined(self, draft: Draft) -> None:
        if draft.is_joined and draft.meta.parent not in self._catalog:
            raise NotFound("the block before this one was dropped", param="parent")
        if not self._catalog.can_begin(draft.meta):
            raise InvalidRequest("a block cannot come before itself", param="parent")

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
    """Selects cells of one raw block; `part` counts tokens from the block's first."""
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_tokens, layout.row_bytes)
    tokens = slice(part.token_start, part.token_start + part.num_tokens)
    whole = np.frombuffer(view, np.uint8).reshape(shape)
    return whole[part.layer_start : part.layer_end, :, part.head_start : part.head_end, tokens]


def digest(view: KVBytes) -> int:
    """xxh3-64 of the bytes."""
    return xxhash.xxh3_64_intdigest(view)
