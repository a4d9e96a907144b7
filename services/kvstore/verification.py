"""Verification of the tiers: reads every block and drops damaged ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from halfmoon.catalog.block_identity import BlockMeta
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Tier
from halfmoon.errors import DataLoss, NotFound
from services.kvstore.counts import Counts
from services.kvstore.tiers.cold import ColdTier
from services.kvstore.tiers.disk import DiskTier
from services.kvstore.tiers.dram import DramTier


class Verification:
    """Owns no state: it reads each tier as it is, concurrently with other readers."""

    def __init__(
        self, catalog: Catalog, dram: DramTier, disk: DiskTier | None, cold: ColdTier | None, counts: Counts
    ) -> None:
        self._catalog = catalog
        self._dram = dram
        self._disk = disk
        self._cold = cold
        self._counts = counts

    async def verify(self, tiers: Iterable[Tier]) -> dict[Tier, tuple[int, int]]:
        """(number read, number damaged) by tier. Raises the error of a tier that cannot be read."""
        results = {}
        for tier in sorted(tiers):
            num_damaged = 0
            held = [entry.meta for entry in self._catalog if tier in entry.tiers]
            for meta in held:
                num_damaged += not await self._is_whole(meta, tier)
            results[tier] = len(held), num_damaged
        return results

    async def _is_whole(self, meta: BlockMeta, tier: Tier) -> bool:
        try:
            await self._read(meta, tier)
        except (DataLoss, NotFound):
            if tier is not Tier.DRAM and not self._catalog.is_in(meta.id, tier):
                return True  # it left in the meantime
            self._counts.add(tier, "corrupted")
            self._catalog.lose(meta.id, tier)
            return False
        return True

    async def _read(self, meta: BlockMeta, tier: Tier) -> None:
        if tier is Tier.DRAM:
            self._dram.release(self._dram.acquire(meta.id, use=False))
            await asyncio.sleep(0)
        elif tier is Tier.DISK and self._disk is not None:
            (await self._disk.read(meta.id)).cells()
        elif self._cold is not None:
            (await self._cold.get(meta)).cells()
