"""Event counts by tier: incremented where things happen, read by RPC and metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from halfmoon.catalog.entry import Tier

TierCount = Literal["hits", "evicted", "corrupted", "failed", "written", "skipped", "full"]


@dataclass(slots=True)
class Counts:
    """Counts since the start."""

    num_misses: int = 0  # reads that no tier could serve
    num_stored: int = 0  # blocks that became whole
    num_expired: int = 0
    num_replicated: int = 0  # blocks copied from another store
    num_unreplicated: int = 0  # requested and not copied
    num_cooled: int = 0  # unused replicas dropped
    by_tier: dict[Tier, Counter[TierCount]] = field(default_factory=lambda: {tier: Counter() for tier in Tier})

    def add(self, tier: Tier, what: TierCount, num: int = 1) -> None:
        """Counts `num` events of one tier.

        hits: blocks read from it; evicted: to make room; corrupted: damaged or missing copies dropped; failed:
        operations of the tier; written: copies from a faster tier; skipped: copies that could not be made;
        full: writes that its file system had no room for.
        """
        self.by_tier[tier][what] += num

    def total(self, what: TierCount) -> int:
        """Sum over all tiers."""
        return sum(counter[what] for counter in self.by_tier.values())
