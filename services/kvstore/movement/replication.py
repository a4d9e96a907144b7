"""Replication: copies hot prefixes from another store to where they are needed (Mooncake, section 6.2).

Bounded: at most `MAX_WAITING` prompts wait, and one is copied at a time, block after block from its first, until one
cannot be loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from halfmoon.catalog.block_identity import BlockMeta, block_id
from halfmoon.errors import Forbidden, HalfmoonError, NoCapacity, NotFound
from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import KVBytes, KVLayout
from halfmoon.kv.owner import SHARED, KVOwner
from halfmoon.policy.placement.store_choice import runs
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from services.kvstore.pool import Pool

log = logging.getLogger(__name__)

MAX_WAITING = 16  # prompts
_BLOCK_DEADLINE_S = 10.0
_MOST_SHARE = 0.5  # of the memory: copies push out what only this store has
_RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True)
class _Replication:
    source: str
    keys: Sequence[bytes]
    salt: bytes
    layout: KVLayout
    owner: KVOwner


class Replicator:
    """Owns the waiting prompts. Runs as one task."""

    def __init__(self, pool: Pool, credential: Credential | None = None, peers: Container[str] = ()) -> None:
        """`peers`: addresses that may be copied from. Without any, only mutual TLS tells a store from a stranger."""
        self._pool = pool
        self._credential = credential
        self._peers = peers
        self._asks_certificate = not peers and credential is not None and credential.tls is not None
        self._waiting: asyncio.Queue[_Replication] = asyncio.Queue(MAX_WAITING)

    def request(
        self, source: str, keys: Sequence[bytes], salt: bytes, layout: KVLayout, owner: KVOwner = SHARED
    ) -> int:
        """Queues a prompt's blocks for copying; returns how many are missing. Raises Forbidden and NoCapacity."""
        if source not in self._peers and not self._asks_certificate:
            raise Forbidden(
                f"this store does not copy from {source}: start it with --peers {source} if that is a store"
            )
        wanted = _Replication(source, keys, salt, layout, owner)
        num_missing = self._num_missing(wanted)
        if num_missing:
            try:
                self._waiting.put_nowait(wanted)
            except asyncio.QueueFull:
                raise NoCapacity(
                    f"{MAX_WAITING} prompts are to be copied already", retry_after_ms=_RETRY_AFTER_MS
                ) from None
        return num_missing

    async def run(self) -> None:
        """Copies until cancelled."""
        while True:
            wanted = await self._waiting.get()
            client = KVStoreClient(wanted.source, wanted.salt, credential=self._credential)
            try:
                await self._copy(client, wanted)
            except HalfmoonError as error:
                log.info("replication.ended", extra={"reason": error.message})
            except Exception as error:  # nothing that another store sends may end this task
                log.error("replication.failed", exc_info=error)
            finally:
                self._pool.counts.num_unreplicated += self._num_missing(wanted)
                await client.close()
                self._waiting.task_done()

    async def settled(self) -> None:
        """Returns when no prompt waits. For tests."""
        await self._waiting.join()

    def _num_missing(self, wanted: _Replication) -> int:
        return sum(block_id(key, wanted.salt) not in self._pool.catalog for key in wanted.keys)

    async def _copy(self, client: KVStoreClient, wanted: _Replication) -> None:
        theirs = await client.find(wanted.keys, deadline_s=_BLOCK_DEADLINE_S)
        here = {place for place, key in enumerate(wanted.keys) if block_id(key, wanted.salt) in self._pool.catalog}
        self._pool.set_quota(wanted.owner)
        for run in runs(len(wanted.keys), theirs.keys() - here):
            keys = wanted.keys[run.start : run.stop]
            deadline_s = len(keys) * _BLOCK_DEADLINE_S
            async with aclosing(client.get_run(keys, wanted.layout, deadline_s=deadline_s)) as blocks:
                depth = run.start
                async for cells in blocks:
                    await self._enter(wanted, depth, cells, is_joined=depth > run.start or depth - 1 in here)
                    depth += 1

    async def _enter(self, wanted: _Replication, depth: int, cells: KVBytes, *, is_joined: bool) -> None:
        """Enters one block. Raises NotFound if its predecessor was here (`is_joined`) and has been dropped."""
        layout = wanted.layout
        parent = block_id(wanted.keys[depth - 1], wanted.salt) if depth else None
        meta = BlockMeta(block_id(wanted.keys[depth], wanted.salt), parent, depth, layout, tenant=wanted.owner.tenant)
        if meta.id in self._pool.catalog:  # a worker brought it in the meantime
            return
        if is_joined and parent not in self._pool.catalog:
            raise NotFound("the block before this one was dropped")
        if (len(self._pool.replicas) + 1) * layout.block_bytes > _MOST_SHARE * self._pool.dram.capacity_bytes:
            raise NoCapacity(f"copies of other stores' blocks take {_MOST_SHARE:.0%} of the memory already")
        draft = self._pool.reserve(meta)
        try:
            draft.write(KVRange(0, layout.num_layers, 0, layout.num_kv_heads, 0, layout.block_tokens), cells)
            await self._pool.commit_replica(draft)
        finally:
            self._pool.discard(draft)
