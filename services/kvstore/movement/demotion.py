"""Copies new blocks to a slower tier, in the background of the requests that brought them.

A slower tier holds what the faster ones hold, as far as it keeps up. Eviction from DRAM is then just forgetting, and a
restart finds the blocks again. The queue holds ids, not bytes. Blocks beyond its bound, or evicted before their turn,
are counted and not copied.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import NamedTuple

from halfmoon.catalog.block_identity import BlockMeta
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Tier
from halfmoon.errors import HalfmoonError, Unavailable
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.kv_layout import KVBytes
from halfmoon.rpc.breaker import CircuitBreaker
from services.kvstore.counts import Counts
from services.kvstore.outage import Outage
from services.kvstore.tiers.dram import Block, DramTier
from services.kvstore.tiers.record import Record, encode_record
from services.kvstore.tiers.residual_window import codec_for
from services.kvstore.tiers.seal import Seal

log = logging.getLogger(__name__)

MAX_WAITING = 65_536
MAX_TRIES = 5  # of a block that fails while others of its batch are stored
BATCH_BYTES = 32 << 20

Write = tuple[BlockMeta, tuple[KVBytes, KVBytes]]  # a record as (header, payload)
Store = Callable[[Sequence[Write]], Awaitable[list[tuple[BlockMeta, int]]]]
Fetch = Callable[[bytes], Awaitable[Record | None]]


async def _nowhere(block: bytes) -> Record | None:
    return None


class _Waiting(NamedTuple):
    is_anew: bool  # write it even if the tier has it
    num_tries: int = 1  # with this one


class Demoter:
    """Owns the blocks that wait for one tier. Runs as one task, so that the tier gets one batch at a time."""

    def __init__(
        self,
        tier: Tier,
        codec: EntryCodec,
        budget_bytes: Callable[[], int],
        store: Store,
        pause_s: float,
        catalog: Catalog,
        dram: DramTier,
        counts: Counts,
        seal: Seal,
        fetch: Fetch = _nowhere,
    ) -> None:
        """budget_bytes: of the tier, which may change. pause_s: first pause after a failure; it grows.

        store: writes records to the tier and returns those stored; raises OSError or Unavailable if none was. The
        others are tried again, after a pause and up to `MAX_TRIES` times.

        fetch: reads a record from a tier between DRAM and this one.
        """
        self._tier = tier
        self.codec = codec
        self._budget_bytes = budget_bytes
        self._store = store
        self._breaker = CircuitBreaker(1, pause_s)
        self.outage = Outage("demotion.failed", tier=tier.name)
        self._catalog = catalog
        self._dram = dram
        self._counts = counts
        self._seal = seal
        self._fetch = fetch
        self._waiting: OrderedDict[bytes, _Waiting] = OrderedDict()
        self._has_some = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_waiting(self) -> int:
        """Number of blocks in the queue."""
        return len(self._waiting)

    def enqueue(self, block: bytes) -> None:
        """Queues a block that the tier should hold too."""
        if self._catalog.is_in(block, self._tier) or block in self._waiting:
            return
        if self._has_room():
            self._wait_for(block, anew=False)

    def renew(self, block: bytes) -> None:
        """Queues a replacement of the tier's copy, if it has one, because its codec would be different now."""
        if self._catalog.is_in(block, self._tier) and block not in self._waiting and self._has_room():
            self._wait_for(block, anew=True)

    async def idle(self) -> None:
        """Returns when nothing waits."""
        await self._is_idle.wait()

    async def run(self) -> None:
        """Copies until cancelled."""
        while True:
            await self._has_some.wait()
            await asyncio.sleep(self._breaker.wait_s(time.monotonic()))
            await self._copy_some()
            if not self._waiting:
                self._has_some.clear()
                self._is_idle.set()

    def _has_room(self) -> bool:
        if len(self._waiting) < MAX_WAITING:
            return True
        self._counts.add(self._tier, "skipped")
        return False

    def _wait_for(self, block: bytes, anew: bool) -> None:
        self._waiting[block] = _Waiting(anew)
        self._has_some.set()
        self._is_idle.clear()

    async def _copy_some(self) -> None:
        taken, acquired, records = await self._gather()
        parents = [meta.parent for meta, _ in records if meta.parent is not None and meta.parent in self._catalog]
        for block in parents:
            self._catalog.hold(block)
        try:
            if records and self._make_room(sum(len(head) + memoryview(body).nbytes for _, (head, body) in records)):
                stored = await self._store(records)
                self._enter(stored)
                self.outage.succeeded()
                if self._try_again(taken, {meta.id for meta, _ in records}, {meta.id for meta, _ in stored}):
                    self._breaker.failed(time.monotonic())
                else:
                    self._breaker.succeeded()
            elif records:
                self._counts.add(self._tier, "skipped", len(records))
        except (OSError, Unavailable) as err:
            self._counts.add(self._tier, "failed")
            if isinstance(err, OSError) and err.errno in (errno.ENOSPC, errno.EDQUOT):
                self._counts.add(self._tier, "full")
            self._breaker.failed(time.monotonic())
            self.outage.failed(err)
            for block, waiting in reversed(taken.items()):
                self._waiting[block] = waiting
                self._waiting.move_to_end(block, last=False)
        finally:
            for block in parents:
                self._catalog.release(block)
            for held in acquired:
                self._dram.release(held)

    def _try_again(self, taken: dict[bytes, _Waiting], sent: Set[bytes], stored: Set[bytes]) -> bool:
        """Queues blocks again of which the record, or a predecessor's, was sent and not stored. True if any."""
        has_some = False
        for block, waiting in taken.items():
            is_there = block in stored and self._catalog.is_in(block, self._tier)
            if is_there or block not in sent or block not in self._catalog or sent <= stored:
                continue
            if waiting.num_tries < MAX_TRIES:
                self._waiting[block] = waiting._replace(num_tries=waiting.num_tries + 1)
                has_some = True
            else:
                self._counts.add(self._tier, "skipped")
        return has_some

    async def _gather(self) -> tuple[dict[bytes, _Waiting], list[Block], list[Write]]:
        """Collects the next records to write, each after its parent, with the blocks whose rooms they lie in."""
        taken: dict[bytes, _Waiting] = {}
        acquired: list[Block] = []
        records: dict[bytes, Write] = {}
        num_bytes, most_bytes = 0, min(BATCH_BYTES, self._budget_bytes() // 4)
        try:
            while self._waiting and num_bytes <= most_bytes:
                block, waiting = self._waiting.popitem(last=False)
                taken[block] = waiting
                for wanted in [block] if waiting.is_anew and block in self._catalog else self._chain(block, records):
                    write = await self._record(wanted, acquired)
                    if write is None:
                        self._counts.add(self._tier, "skipped")
                        break
                    records[wanted] = write
                    num_bytes += memoryview(write[1][1]).nbytes
        except BaseException:
            for held in acquired:
                self._dram.release(held)
            raise
        return taken, acquired, list(records.values())

    def _chain(self, block: bytes, records: dict[bytes, Write]) -> list[bytes]:
        """The block and its predecessors that the tier lacks, first to last; empty if there is nothing to do."""
        chain: list[bytes] = []
        entry = self._catalog.get(block)
        while entry is not None and self._tier not in entry.tiers and entry.meta.id not in records:
            chain.append(entry.meta.id)
            entry = self._catalog.get(entry.meta.parent) if entry.meta.parent is not None else None
        return chain[::-1]

    async def _record(self, block: bytes, acquired: list[Block]) -> Write | None:
        try:
            in_dram = self._dram.acquire(block, use=False)
        except HalfmoonError:
            record = await self._fetch(block)
            if record is None:
                return None
        else:
            acquired.append(in_dram)
            record = Record(in_dram.meta, in_dram.codec, in_dram.room.view)
        codec = codec_for(self.codec, record.meta, self._catalog)
        try:
            payload = record.payload
            if record.codec != codec:
                payload = await asyncio.to_thread(_recoded, record, codec)
        except HalfmoonError as err:
            log.warning("demotion.not_encoded", extra={"tier": self._tier.name, "reason": err.message})
            return None
        return record.meta, await asyncio.to_thread(encode_record, record.meta, codec, payload, self._seal)

    def _make_room(self, num_bytes: int) -> bool:
        while self._catalog.used_bytes(self._tier) + num_bytes > self._budget_bytes():
            if self._catalog.pop_victim(self._tier) is None:
                return False
        return True

    def _enter(self, stored: Sequence[tuple[BlockMeta, int]]) -> None:
        """Makes stored records visible in the tier if their blocks are still here and outlive no predecessor."""
        for meta, num_bytes in stored:
            parent = None if meta.parent is None else self._catalog.get(meta.parent)
            if meta.id in self._catalog and (parent is None or self._tier in parent.tiers):
                self._catalog.add(meta, self._tier, num_bytes)
                self._counts.add(self._tier, "written")
            else:
                self._counts.add(self._tier, "skipped")
                self._catalog.reject(meta, self._tier)


def _recoded(record: Record, codec: EntryCodec) -> KVBytes:
    assert record.meta.layout is not None
    return codec.encode(record.cells(), record.meta.layout)
