"""Write-behind: one demoter per slower tier, and how a batch reaches the tier."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

from halfmoon.catalog.block_identity import BlockMeta
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Tier
from halfmoon.errors import HalfmoonError, Unavailable
from services.kvstore.counts import Counts
from services.kvstore.movement.demotion import Demoter, Write
from services.kvstore.movement.disk_upkeep import DiskUpkeep
from services.kvstore.options import PoolOptions
from services.kvstore.tiers.cold import ColdTier
from services.kvstore.tiers.disk import DiskTier
from services.kvstore.tiers.dram import DramTier
from services.kvstore.tiers.record import Record
from services.kvstore.tiers.residual_window import left_behind


class WriteBehind:
    """Owns the queues to the slower tiers that exist."""

    def __init__(
        self,
        options: PoolOptions,
        catalog: Catalog,
        dram: DramTier,
        disk: DiskTier | None,
        upkeep: DiskUpkeep | None,
        cold: ColdTier | None,
        counts: Counts,
    ) -> None:
        self._options = options
        self._catalog = catalog
        self._dram = dram
        self._disk = disk
        self._upkeep = upkeep
        self._cold = cold
        self._counts = counts
        self._demoters = self._make_demoters()

    def enqueue(self, newest: BlockMeta) -> None:
        """Queues copies of a new block that is in DRAM."""
        for demoter in self._demoters.values():
            demoter.enqueue(newest.id)
            behind = left_behind(demoter.codec, newest, self._catalog)
            if behind is not None:
                demoter.renew(behind)

    def enqueue_all(self) -> None:
        """Queues copies of all that is in DRAM to where they are missing."""
        for entry in self._catalog:
            if Tier.DRAM in entry.tiers:
                self.enqueue(entry.meta)

    def trouble(self, tier: Tier) -> str:
        """Why nothing can be written to the tier now; empty if it can."""
        return self._demoters[tier].outage.reason if tier in self._demoters else ""

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines that have to run."""
        return [demoter.run() for demoter in self._demoters.values()]

    async def settled(self) -> None:
        """Returns when nothing waits."""
        for demoter in self._demoters.values():
            await demoter.idle()

    def num_waiting(self, tier: Tier) -> int:
        """Number of blocks waiting to be copied to the tier."""
        return self._demoters[tier].num_waiting if tier in self._demoters else 0

    def _make_demoters(self) -> dict[Tier, Demoter]:
        made = {}
        if self._disk is not None:
            made[Tier.DISK] = Demoter(
                Tier.DISK, self._options.disk_codec, self._disk_budget_bytes,
                self._store_on_disk, self._options.retry_pause_s, self._catalog, self._dram, self._counts,
                self._disk.seal,
            )  # fmt: skip
        if self._cold is not None:
            made[Tier.COLD] = Demoter(
                Tier.COLD, self._options.cold_codec, self._cold_budget_bytes, self._store_in_cold,
                self._options.retry_pause_s, self._catalog, self._dram, self._counts, self._cold.seal,
                self._from_disk,
            )  # fmt: skip
        return made

    def _disk_budget_bytes(self) -> int:
        return 0 if self._disk is None else self._disk.live_budget_bytes

    def _cold_budget_bytes(self) -> int:
        return 0 if self._cold is None else self._cold.budget_bytes

    async def _store_on_disk(self, records: Sequence[Write]) -> list[tuple[BlockMeta, int]]:
        assert self._disk is not None
        assert self._upkeep is not None
        await self._upkeep.check()
        num_bytes = sum(len(head) + memoryview(body).nbytes for _, (head, body) in records)
        self._upkeep.lose(await self._disk.compact(num_bytes))
        wanted = [record for record in records if record[0].id in self._catalog]  # otherwise a drop would not last
        stored = await self._disk.write(wanted)
        pins = [(meta.id, True) for meta, _ in stored if self._is_pinned(meta.id)]
        if pins:
            await self._disk.flush(pins)
        return stored

    async def _store_in_cold(self, records: Sequence[Write]) -> list[tuple[BlockMeta, int]]:
        assert self._cold is not None
        if self._cold.breaker.state == "closed":
            return await self._put_in_cold(records)
        # The tier may still be down: one record alone decides, or the breaker would refuse the rest of the batch.
        return [*await self._put_in_cold(records[:1]), *await self._put_in_cold(records[1:])]

    async def _put_in_cold(self, records: Sequence[Write]) -> list[tuple[BlockMeta, int]]:
        assert self._cold is not None
        bodies = [bytes(head) + bytes(body) for _, (head, body) in records]
        puts = [self._cold.put(meta, body) for (meta, _), body in zip(records, bodies, strict=True)]
        results = await asyncio.gather(*puts, return_exceptions=True)
        failures = [result for result in results if result is not None]
        for failure in failures:
            if not isinstance(failure, Unavailable):
                raise failure
        if failures and len(failures) == len(results):
            raise failures[0]
        self._counts.add(Tier.COLD, "failed", len(failures))
        done = zip(records, bodies, results, strict=True)
        return [(meta, len(body)) for (meta, _), body, result in done if result is None]

    async def _from_disk(self, block: bytes) -> Record | None:
        if self._disk is None or not self._catalog.is_in(block, Tier.DISK):
            return None
        with contextlib.suppress(HalfmoonError, OSError):
            return await self._disk.read(block)
        return None

    def _is_pinned(self, block: bytes) -> bool:
        entry = self._catalog.get(block)
        return entry is not None and entry.pinned
