"""Periodic work: expiry, background deletions, and learning what other stores put into the cold tier."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from halfmoon.catalog.block_identity import BlockMeta
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Tier
from halfmoon.catalog.replica_marks import ReplicaMarks
from halfmoon.errors import Unavailable
from services.kvstore.counts import Counts
from services.kvstore.movement.disk_upkeep import DiskUpkeep
from services.kvstore.options import PoolOptions
from services.kvstore.outage import Outage
from services.kvstore.tiers.cold import ColdTier
from services.kvstore.tiers.disk import DiskTier

log = logging.getLogger(__name__)


class Maintenance:
    """Owns nothing but what of it fails at present: loops over the tiers."""

    def __init__(
        self,
        options: PoolOptions,
        catalog: Catalog,
        replicas: ReplicaMarks,
        disk: DiskTier | None,
        cold: ColdTier | None,
        counts: Counts,
        now_s: Callable[[], float],
    ) -> None:
        self._options = options
        self._catalog = catalog
        self._replicas = replicas
        self._disk = disk
        self._cold = cold
        self._counts = counts
        self._now_s = now_s
        self._flushing = Outage("disk.flush_failed")
        self._listing = Outage("cold.not_listed")

    async def sweep(self) -> None:
        """Expires blocks and completes background deletions."""
        while True:
            await asyncio.sleep(self._options.sweep_s)
            self._counts.num_expired += self._catalog.expire(self._now_s())
            self.drop_cooled()
            await self.flush()
            if self._cold is not None:
                with contextlib.suppress(Unavailable):
                    await self._cold.sweep()

    async def look_after_disk(self, upkeep: DiskUpkeep) -> None:
        """Follows what others do to the disk. A loop of its own: a file system may hang."""
        while True:
            await asyncio.sleep(self._options.sweep_s)
            await upkeep.check()

    def drop_cooled(self) -> None:
        """Drops unused replicas from the ends of prompts, as far as possible."""
        while cooled := self._replicas.cooled(self._catalog, self._now_s(), self._options.replica_cool_s):
            self._counts.num_cooled += sum(self._catalog.drop(block) for block in cooled)

    async def flush(self, pins: Sequence[tuple[bytes, bool]] = ()) -> None:
        """Writes removals and pins to the disk's index. If that fails, they wait for its next write."""
        if self._disk is None or not self._disk.is_here:
            return
        try:
            await self._disk.flush(pins)
        except OSError as err:
            self._counts.add(Tier.DISK, "failed")
            self._flushing.failed(err)
        else:
            self._flushing.succeeded()

    async def list_cold(self, cold: ColdTier) -> None:
        """Learns what the cold tier holds: at the start, and later what other stores added."""
        while True:
            try:
                for meta, num_bytes in await cold.list(self._options.cold_list_s):
                    self._learn_cold(meta, num_bytes)
            except Unavailable as err:
                self._listing.failed(err.message)
                await asyncio.sleep(max(self._options.retry_pause_s, cold.breaker.wait_s(time.monotonic())))
                continue
            self._listing.succeeded()
            log.info("cold.listed", extra={"num_blocks": self._catalog.num_blocks(Tier.COLD)})
            await asyncio.sleep(self._options.cold_list_s)

    def _learn_cold(self, meta: BlockMeta, num_bytes: int) -> None:
        if not self._catalog.can_begin(meta):
            return
        entry = self._catalog.get(meta.id)
        if (entry is None or Tier.COLD not in entry.tiers) and self._catalog.can_add(meta.parent, Tier.COLD):
            self._catalog.add(meta if entry is None else entry.meta, Tier.COLD, num_bytes)
