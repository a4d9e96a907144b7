"""Copies of blocks from another store: hot prefixes come to where they are wanted (Mooncake, section 6.2).

Bounded: so many prompts wait, and one is copied at a time, block after block from its first, until one cannot be had.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.errors import HalfmoonError, NoCapacity
from halfmoon.kv.frame import KVRange
from halfmoon.kv.layout import KVLayout
from halfmoon.rpc.kvstore_client import KVStoreClient
from services.kvstore.identity import BlockMeta, block_id
from services.kvstore.pool import Pool

log = logging.getLogger(__name__)

MAX_WAITING = 16  # prompts
_BLOCK_DEADLINE_S = 10.0
_RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True)
class _Wanted:
    source: str
    keys: Sequence[bytes]
    salt: bytes
    layout: KVLayout


class Replicator:
    """Owns the prompts that wait. Runs as one task."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: asyncio.Queue[_Wanted] = asyncio.Queue(MAX_WAITING)

    def request(self, source: str, keys: Sequence[bytes], salt: bytes, layout: KVLayout) -> int:
        """Has a prompt's blocks copied behind the caller; gives how many are missing. Raises NoCapacity."""
        num_missing = sum(block_id(key, salt) not in self._pool.catalog for key in keys)
        if num_missing:
            try:
                self._waiting.put_nowait(_Wanted(source, keys, salt, layout))
            except asyncio.QueueFull:
                raise NoCapacity(
                    f"{MAX_WAITING} prompts are to be copied already", retry_after_ms=_RETRY_AFTER_MS
                ) from None
        return num_missing

    async def run(self) -> None:
        """Copies until it is cancelled."""
        while True:
            wanted = await self._waiting.get()
            num_left = len(wanted.keys)
            client = KVStoreClient(wanted.source, wanted.salt)
            try:
                for depth, key in enumerate(wanted.keys):
                    await self._copy(client, wanted, depth, key)
                    num_left -= 1
            except HalfmoonError as error:
                self._pool.counts.num_unreplicated += num_left
                log.info("replication.ended", extra={"num_left": num_left, "reason": error.message})
            finally:
                await client.close()
                self._waiting.task_done()

    async def settled(self) -> None:
        """Returns when nothing waits. For tests."""
        await self._waiting.join()

    async def _copy(self, client: KVStoreClient, wanted: _Wanted, depth: int, key: bytes) -> None:
        block = block_id(key, wanted.salt)
        if block in self._pool.catalog:
            return
        layout = wanted.layout
        cells = await client.get(key, layout, deadline_s=_BLOCK_DEADLINE_S)
        parent = block_id(wanted.keys[depth - 1], wanted.salt) if depth else None
        draft = self._pool.reserve(BlockMeta(block, parent, depth, layout))
        try:
            draft.write(KVRange(0, layout.num_layers, 0, layout.num_kv_heads, 0, layout.block_tokens), cells)
            await self._pool.commit_replica(draft)
        finally:
            self._pool.discard(draft)
