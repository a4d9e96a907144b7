"""Keeps the catalog true to the disk: what its directory lost, and what it gives back when others fill it."""

from __future__ import annotations

from collections.abc import Callable

from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Tier
from services.kvstore.counts import Counts
from services.kvstore.outage import Outage
from services.kvstore.tiers.disk import DiskTier


class DiskUpkeep:
    """Owns nothing but whether it fails at present. Called each second and before each write."""

    def __init__(self, catalog: Catalog, disk: DiskTier, counts: Counts, on_anew: Callable[[], None]) -> None:
        """on_anew: the disk has lost what it held, so that what is in DRAM has to be written again."""
        self._catalog = catalog
        self._disk = disk
        self._counts = counts
        self._on_anew = on_anew
        self._giving_back = Outage("disk.not_given_back")

    async def check(self) -> None:
        """Notices a directory that is gone or back, and follows the room that there is."""
        if await self._disk.check() == "anew":
            self._forget_all()
            self.recover()
            self._on_anew()
        if self._disk.is_here:
            self._evict()
            try:
                self.lose(await self._disk.give_back())
            except OSError as err:
                self._giving_back.failed(err)
            else:
                self._giving_back.succeeded()

    def recover(self) -> None:
        """Takes over blocks found on disk; forgets those that would outlive their predecessors in memory."""
        for row in self._disk.recovered():
            meta = row.meta
            if self._catalog.can_begin(meta) and self._catalog.can_add(meta.parent, Tier.DISK):
                self._disk.admit(row)
                self._catalog.add(meta, Tier.DISK, row.place.num_bytes)
                self._catalog.pin(meta.id, row.pinned)
            else:
                self._disk.forget(meta.id)
        self._evict()

    def lose(self, blocks: list[bytes]) -> None:
        """Removes copies that the disk could not keep."""
        for block in blocks:
            self._counts.add(Tier.DISK, "corrupted")
            self._catalog.lose(block, Tier.DISK)

    def _evict(self) -> None:
        while self._catalog.used_bytes(Tier.DISK) > self._disk.live_budget_bytes:
            if self._catalog.pop_victim(Tier.DISK) is None:
                break

    def _forget_all(self) -> None:
        """Ends of prompts first, so that no block in memory loses what it depends on before its turn."""
        held = [entry for entry in self._catalog if Tier.DISK in entry.tiers]
        for entry in sorted(held, key=lambda entry: entry.meta.depth, reverse=True):
            self._catalog.lose(entry.meta.id, Tier.DISK)
