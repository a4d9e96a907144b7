"""Loads from the slower tiers: one load per block for all its readers, a bounded number at once, into DRAM."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Entry, Tier
from halfmoon.errors import DataLoss, HalfmoonError, NoCapacity, NotFound, Unavailable
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.rpc.breaker import CircuitBreaker
from services.kvstore.counts import Counts
from services.kvstore.tiers.cold import ColdTier
from services.kvstore.tiers.disk import DiskTier
from services.kvstore.tiers.dram import DramTier
from services.kvstore.tiers.record import Record
from services.kvstore.tiers.residual_window import codec_for

log = logging.getLogger(__name__)

MAX_AT_ONCE = 8
MAX_WAITING = 1024  # prefetches beyond it are refused


class Loader:
    """Owns the loads in progress."""

    def __init__(
        self,
        catalog: Catalog,
        dram: DramTier,
        dram_codec: EntryCodec,
        disk: DiskTier | None,
        disk_breaker: CircuitBreaker,
        cold: ColdTier | None,
        counts: Counts,
    ) -> None:
        self._catalog = catalog
        self._dram = dram
        self._dram_codec = dram_codec
        self._disk = disk
        self._disk_breaker = disk_breaker
        self._cold = cold
        self._counts = counts
        self._loads: dict[bytes, asyncio.Task[Record]] = {}
        self._slots = {tier: asyncio.Semaphore(MAX_AT_ONCE) for tier in Tier}  # a slow tier holds up its own loads

    def is_reachable(self, entry: Entry) -> bool:
        """Whether some tier that has the block can be read now."""
        now_s = time.monotonic()
        return (
            Tier.DRAM in entry.tiers
            or (Tier.DISK in entry.tiers and self._is_disk_readable(now_s))
            or (Tier.COLD in entry.tiers and self._cold is not None and not self._cold.breaker.is_open(now_s))
        )

    def _is_disk_readable(self, now_s: float) -> bool:
        return self._disk is not None and self._disk.is_here and not self._disk_breaker.is_open(now_s)

    async def load(self, block: bytes) -> Record:
        """Loads the block from the fastest tier that delivers it intact. Raises NotFound, DataLoss or Unavailable."""
        return await asyncio.shield(self._task(block))

    def prefetch(self, blocks: Sequence[bytes]) -> int:
        """Starts loading blocks into DRAM, in order; returns how many will come or are there."""
        num_coming = 0
        for block in blocks:
            entry = self._catalog.get(block)
            if entry is None or (Tier.DRAM not in entry.tiers and len(self._loads) >= MAX_WAITING):
                break
            num_coming += 1
            if Tier.DRAM not in entry.tiers:
                self._task(block)
        return num_coming

    async def close(self) -> None:
        """Cancels all loads."""
        for task in self._loads.values():
            task.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)

    def _task(self, block: bytes) -> asyncio.Task[Record]:
        task = self._loads.get(block)
        if task is None:
            task = self._loads[block] = asyncio.get_running_loop().create_task(self._load(block))
            task.add_done_callback(lambda done: self._ended(block, done))
        return task

    def _ended(self, block: bytes, task: asyncio.Task[Record]) -> None:
        self._loads.pop(block, None)
        if not task.cancelled() and task.exception() is not None:
            level = logging.DEBUG if isinstance(task.exception(), HalfmoonError) else logging.ERROR
            log.log(level, "load.failed", exc_info=task.exception())

    async def _load(self, block: bytes) -> Record:
        failure: HalfmoonError = NotFound("no block with this key is here")
        for tier in (Tier.DISK, Tier.COLD):
            entry = self._catalog.get(block)
            if entry is None or tier not in entry.tiers:
                continue
            try:
                async with self._slots[tier]:
                    record = await self._read(entry, tier)
                    await self._promote(record)
            except (NotFound, DataLoss) as err:
                entry = self._catalog.get(block)
                if entry is not None and tier in entry.tiers:  # else it left the tier during the read
                    self._refuse(tier, err)
                    self._catalog.lose(block, tier)
                failure = err
                continue
            except (OSError, Unavailable) as err:
                self._counts.add(tier, "failed")
                failure = Unavailable(f"the {tier.name.lower()} tier failed: {err}")
                continue
            self._counts.add(tier, "hits")
            return record
        raise failure

    async def _read(self, entry: Entry, tier: Tier) -> Record:
        if tier is Tier.COLD:
            assert self._cold is not None
            return await self._cold.get(entry.meta)
        assert self._disk is not None
        if not self._disk.is_here:
            raise Unavailable(f"the disk is away: {self._disk.away.reason}")
        if not self._disk_breaker.allows(time.monotonic()):
            raise Unavailable("the disk is not used for a while: it keeps failing")
        try:
            record = await self._disk.read(entry.meta.id)
            record.check_is(entry.meta)
        except OSError:
            self._disk_breaker.failed(time.monotonic())
            raise
        except HalfmoonError:
            self._disk_breaker.succeeded()
            raise
        self._disk_breaker.succeeded()
        return record

    def _refuse(self, tier: Tier, err: HalfmoonError) -> None:
        """Counts a damaged, forged or missing copy; the first of each tier is logged."""
        is_first = not self._counts.by_tier[tier]["corrupted"]
        self._counts.add(tier, "corrupted")
        log.log(
            logging.WARNING if is_first else logging.DEBUG,
            "block.refused",
            extra={"tier": tier.name, "reason": err.message},
        )

    async def _promote(self, record: Record) -> None:
        """Copies the block into DRAM if there is room for it and it was not dropped."""
        payload, codec = record.payload, codec_for(self._dram_codec, record.meta, self._catalog)
        if record.codec != codec:
            payload = await asyncio.to_thread(_recoded, record, codec)
        entry = self._catalog.get(record.meta.id)
        if entry is None or Tier.DRAM in entry.tiers:
            return
        try:
            self._dram.insert(entry.meta if entry.meta.layout else record.meta, codec, payload)
        except (NoCapacity, NotFound) as err:
            self._counts.add(Tier.DRAM, "skipped")
            log.debug("promotion.skipped", extra={"reason": err.message})


def _recoded(record: Record, codec: EntryCodec) -> memoryview:
    assert record.meta.layout is not None
    return memoryview(codec.encode(record.cells(), record.meta.layout)).cast("B")
