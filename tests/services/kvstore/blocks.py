"""Blocks for tests of the store: their bytes follow from their keys, so whoever reads one can tell that it is right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halfmoon.catalog.block_identity import BlockMeta, block_id, key_of
from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import KVLayout
from services.kvstore.pool import Pool

LAYOUT = KVLayout(2, 2, 8, "bfloat16", 16)  # 2 KiB a block


def key(*parts: int) -> bytes:
    """A key of its own for each tuple of numbers below 2**16."""
    return b"".join(part.to_bytes(2, "big") for part in parts).ljust(16, b"\0")


def content(of: bytes, layout: KVLayout = LAYOUT) -> bytes:
    """The block's raw bytes: finite numbers, as KV is. `of`: its key or id."""
    seed = int.from_bytes(of[-16:], "big")
    values = np.random.default_rng(seed).standard_normal(layout.block_bytes // layout.item_bytes, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes() if layout.item_bytes == 2 else values.tobytes()


def meta(block: bytes, parent: bytes | None = None, depth: int = 0, layout: KVLayout = LAYOUT) -> BlockMeta:
    """As a worker would name it."""
    return BlockMeta(block, parent, depth, layout)


async def put(pool: Pool, of: BlockMeta) -> bytes:
    """Stores a block with its content; gives its id."""
    draft = pool.reserve(of)
    layout = draft.layout
    whole = KVRange(0, layout.num_layers, 0, layout.num_kv_heads, 0, layout.block_tokens)
    draft.write(whole, content(of.id, layout))
    try:
        await pool.commit(draft)
    finally:
        pool.discard(draft)
    return of.id


async def put_chain(pool: Pool, keys: Sequence[bytes], salt: bytes = b"") -> list[bytes]:
    """Stores a prompt's blocks; gives their ids."""
    ids = [block_id(one, salt) for one in keys]
    for depth, block in enumerate(ids):
        await put(pool, meta(block, ids[depth - 1] if depth else None, depth))
    return ids


async def read(pool: Pool, block: bytes) -> bytes:
    """The raw block, as the pool gives it."""
    loan = await pool.acquire(block)
    try:
        return bytes(loan.cells())
    finally:
        pool.give_back(loan)


async def is_right(pool: Pool, block: bytes) -> bool:
    """Whether the pool gives the very bytes that were stored."""
    return await read(pool, block) == content(key_of(block))
