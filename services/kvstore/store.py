"""The DRAM tier: content-addressed blocks under a byte budget, least recently used out first. No I/O, no clock.

A block is visible from `commit` on and never before; its digest is checked at every read. Blocks that are still
arriving (drafts) count against the budget, so memory stays within it whatever senders do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray
from typing_extensions import Buffer

from halfmoon.errors import DataLoss, Incompatible, InvalidRequest, NoCapacity, NotFound
from halfmoon.kv.frame import KVRange
from halfmoon.kv.keys import KEY_BYTES
from halfmoon.kv.layout import KVLayout

RETRY_AFTER_MS = 100  # drafts are short-lived: they commit, or their senders' leases end

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One whole block. A reader may hold it after its eviction; its memory is freed when the last reader is done."""

    layout: KVLayout
    data: Bytes  # [num_layers, 2, num_kv_heads, block_tokens, head_dim * item_bytes]
    digest: int  # xxh3-64 of `data`

    def part(self, part: KVRange) -> bytes:
        """A copy of the named cells in canonical order; `part` counts tokens from the block's first."""
        return _cells(self.data, part).tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A block on its way in. Its owner ends it with `commit` or `discard`."""

    key: bytes
    layout: KVLayout
    data: Bytes  # as in Block

    def write(self, part: KVRange, payload: Buffer) -> None:
        """Puts `payload` (canonical order) at `part`, which counts tokens from the block's first."""
        cells = _cells(self.data, part)
        cells[...] = np.frombuffer(memoryview(payload), dtype=np.uint8).reshape(cells.shape)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot; `*_total` count since the start."""

    num_blocks: int
    used_bytes: int
    reserved_bytes: int
    budget_bytes: int
    num_hits_total: int
    num_misses_total: int
    num_stored_total: int
    num_evicted_total: int
    num_corrupted_total: int


class BlockStore:
    """Owns the blocks, their order of use and the budget. Knows nothing of gRPC, frames' order or time."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # least recently used first
        self._drafts: dict[int, Draft] = {}  # by id(): two senders may bring the same key at once
        self._used_bytes = 0
        self._reserved_bytes = 0
        self._num_hits = 0
        self._num_misses = 0
        self._num_stored = 0
        self._num_evicted = 0
        self._num_corrupted = 0

    def reserve(self, key: bytes, layout: KVLayout) -> Draft:
        """Makes room for one block, evicting others if it must.

        Raises InvalidRequest (not a key), Incompatible (the key names a block of another layout) or NoCapacity: for
        ever when the block is larger than the budget, else until other drafts end, with `retry_after_ms`.
        """
        _check_key(key)
        present = self._blocks.get(key)
        if present is not None and present.layout != layout:
            raise Incompatible("the block with this key has another KV layout", param="layout")
        self._make_room(layout.block_bytes)
        draft = Draft(key, layout, _empty(layout))
        self._drafts[id(draft)] = draft
        self._reserved_bytes += layout.block_bytes
        return draft

    def commit(self, draft: Draft) -> None:
        """Makes the block visible, as the most recently used; an earlier block of the same key gives way."""
        self.discard(draft)
        self._drop(draft.key)
        draft.data.flags.writeable = False
        self._blocks[draft.key] = Block(draft.layout, draft.data, _digest(draft.data))
        self._used_bytes += draft.layout.block_bytes
        self._num_stored += 1

    def discard(self, draft: Draft) -> None:
        """Frees the draft's room. Ending a draft twice does nothing."""
        if self._drafts.pop(id(draft), None) is not None:
            self._reserved_bytes -= draft.layout.block_bytes

    def get(self, key: bytes) -> Block:
        """The block, now the most recently used. Raises NotFound, or DataLoss if it went bad, and drops it then."""
        _check_key(key)
        block = self._blocks.get(key)
        if block is None:
            self._num_misses += 1
            raise NotFound("no block with this key is here")
        if _digest(block.data) != block.digest:
            self._drop(key)
            self._num_corrupted += 1
            raise DataLoss("a stored block's digest did not match; it was dropped")
        self._num_hits += 1
        self._blocks.move_to_end(key)
        return block

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are here. They count as used, last to first: a chain's head outlives its tail."""
        for key in keys:
            _check_key(key)
        num_matched = next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))
        for key in reversed(keys[:num_matched]):
            self._blocks.move_to_end(key)
        return num_matched

    def delete(self, keys: Iterable[bytes]) -> int:
        """Forgets blocks; gives how many of `keys` were here."""
        return sum(self._drop(key) for key in keys)

    def stats(self) -> StoreStats:
        """What is held and what happened."""
        return StoreStats(
            num_blocks=len(self._blocks),
            used_bytes=self._used_bytes,
            reserved_bytes=self._reserved_bytes,
            budget_bytes=self._budget_bytes,
            num_hits_total=self._num_hits,
            num_misses_total=self._num_misses,
            num_stored_total=self._num_stored,
            num_evicted_total=self._num_evicted,
            num_corrupted_total=self._num_corrupted,
        )

    def check_integrity(self) -> None:
        """Asserts the store's invariants but the digests. For tests; costs a walk over all blocks."""
        assert self._used_bytes == sum(block.data.nbytes for block in self._blocks.values())
        assert self._reserved_bytes == sum(draft.data.nbytes for draft in self._drafts.values())
        assert self._used_bytes + self._reserved_bytes <= self._budget_bytes
        assert all(block.data.nbytes == block.layout.block_bytes for block in self._blocks.values())
        assert not any(block.data.flags.writeable for block in self._blocks.values())

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > self._budget_bytes:
            raise NoCapacity(f"a block of {num_bytes} bytes is over the whole budget of {self._budget_bytes}")
        if num_bytes > self._budget_bytes - self._reserved_bytes:
            raise NoCapacity("blocks still arriving take all of the budget", retry_after_ms=RETRY_AFTER_MS)
        while num_bytes > self._budget_bytes - self._reserved_bytes - self._used_bytes:
            self._drop(next(iter(self._blocks)))
            self._num_evicted += 1

    def _drop(self, key: bytes) -> bool:
        block = self._blocks.pop(key, None)
        if block is None:
            return False
        self._used_bytes -= block.layout.block_bytes
        return True


def _check_key(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"a block key has {KEY_BYTES} bytes, not {len(key)}", param="key")


def _empty(layout: KVLayout) -> Bytes:
    row_bytes = layout.head_dim * layout.item_bytes
    return np.empty((layout.num_layers, 2, layout.num_kv_heads, layout.block_tokens, row_bytes), dtype=np.uint8)


def _cells(data: Bytes, part: KVRange) -> Bytes:
    tokens = slice(part.token_start, part.token_start + part.num_tokens)
    return data[part.layer_start : part.layer_end, :, part.head_start : part.head_end, tokens]


def _digest(data: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(data.data)
