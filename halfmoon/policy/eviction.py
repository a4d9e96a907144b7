"""Eviction policies of stores, which rank the blocks of a tier. Their owner sees to it that prefixes go from the end.

lru           the longest unused
lfu           the least often used, then the longest unused
length-aware  the least often used, then the latest in its prompt (Mooncake, arXiv 2407.00079, table 1)
cost-aware    the fewest seconds of recompute saved per byte, times its uses, aged (GreedyDual-Size-Frequency,
              Cherkasova 1998; ranks count from the rank of the last evicted block, so that old popularity fades)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

PolicyName = Literal["lru", "lfu", "length-aware", "cost-aware"]

Rank = tuple[float, ...]  # lowest is evicted first; a block's rank never falls while it is used

ASSUMED_S_PER_TOKEN = 1e-3  # assumed when no worker reported a cost for the layout; only ratios to other blocks matter


@dataclass(slots=True)
class Usage:
    """What a policy may know of a block."""

    last_used: int  # counter over uses of all blocks
    num_uses: int
    depth: int  # blocks before it in its prompt
    num_tokens: int
    recompute_s: float  # mean of its layout if its own cost is unknown; 0 if that is unknown too


class EvictionPolicy(Protocol):
    """Ranks the blocks of one tier."""

    def rank(self, usage: Usage, num_bytes: int) -> Rank:
        """Current rank of the block; called at each use."""

    def evicted(self, rank: Rank) -> None:
        """Learns that a block of this rank was evicted."""


class LRU:
    """See the module."""

    def rank(self, usage: Usage, num_bytes: int) -> Rank:
        return (usage.last_used,)

    def evicted(self, rank: Rank) -> None:
        """Learns nothing."""


class LFU(LRU):
    """See the module."""

    def rank(self, usage: Usage, num_bytes: int) -> Rank:
        return (usage.num_uses, usage.last_used)


class LengthAware(LRU):
    """See the module."""

    def rank(self, usage: Usage, num_bytes: int) -> Rank:
        return (usage.num_uses, -usage.depth, usage.last_used)


class CostAware:
    """Owns the age of the tier: the highest rank evicted so far. See the module."""

    def __init__(self) -> None:
        self._age = 0.0

    def rank(self, usage: Usage, num_bytes: int) -> Rank:
        saved_s = usage.recompute_s or ASSUMED_S_PER_TOKEN * max(1, usage.num_tokens)
        return (self._age + usage.num_uses * saved_s / max(1, num_bytes), usage.last_used)

    def evicted(self, rank: Rank) -> None:
        self._age = max(self._age, rank[0])


def policy_named(name: PolicyName) -> EvictionPolicy:
    """Creates a policy by name."""
    policies: dict[PolicyName, type[EvictionPolicy]] = {
        "lru": LRU,
        "lfu": LFU,
        "length-aware": LengthAware,
        "cost-aware": CostAware,
    }
    return policies[name]()
