"""Marks of replicas (blocks copied from other stores) and how long they have been unused. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Tier


@dataclass(slots=True)
class _Mark:
    num_uses: int  # at the last check
    used_at_s: float


class ReplicaMarks:
    """Owns the marks. A block that this store owns, that is pinned or that is in a slower tier is not a replica."""

    def __init__(self) -> None:
        self._marks: dict[bytes, _Mark] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def mark(self, block: bytes, num_uses: int, now_s: float) -> None:
        """Marks a block that has just been copied here."""
        self._marks[block] = _Mark(num_uses, now_s)

    def unmark(self, block: bytes) -> bool:
        """Makes the block this store's own; returns whether it was marked."""
        return self._marks.pop(block, None) is not None

    def cooled(self, catalog: Catalog, now_s: float, cool_s: float) -> list[bytes]:
        """Replicas unused for `cool_s` that no block depends on. Call again after dropping them."""
        cooled = []
        for block, mark in list(self._marks.items()):
            entry = catalog.get(block)
            if entry is None or entry.pinned or set(entry.tiers) != {Tier.DRAM}:
                self.unmark(block)
            elif entry.usage.num_uses != mark.num_uses:
                self.mark(block, entry.usage.num_uses, now_s)
            elif now_s - mark.used_at_s >= cool_s and not entry.children and not entry.num_holds:
                cooled.append(block)
        return cooled
