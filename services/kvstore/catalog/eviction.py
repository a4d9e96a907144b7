"""Which block of a tier goes first. A policy ranks; that prefixes go from their ends is the catalog's law, not theirs.

lru           the longest unused
lfu           the least often used, then the longest unused
length-aware  the least often used, then the latest in its prompt (Mooncake, arXiv 2407.00079, table 1)
cost-aware    the fewest seconds of recompute saved per byte, times its uses, aged (GreedyDual-Size-Frequency:
              Cherkasova 1998; the rank counts from the rank of what went last, so that old fame fades)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from halfmoon.config.stores import PolicyName

Rank = tuple[float, ...]  # the lowest goes first; of one block it never falls while it is used

ASSUMED_S_PER_TOKEN = 1e-3  # where no worker said what a block of the layout costs; only the ratio to others matters


@dataclass(slots=True)
class Usage:
    """What a policy may know of a block."""

    last_used: int  # counts uses of any block
    num_uses: int
    depth: int  # blocks before it in its prompt
    num_tokens: int
    recompute_s: float  # of blocks of its layout, where its own is unknown; 0: of those, too


class EvictionPolicy(Protocol):
    """Ranks the blocks of one tier."""

    def rank(self, usage: Usage, num_bytes: int) -> Rank:
        """The block's rank as of now; asked at each use."""
        ...

    def evicted(self, rank: Rank) -> None:
        """A block of this rank had to go."""
        ...


class LRU:
    """See the module."""

    def rank(self, usage: Usage, num_bytes: int) -> Rank:
        return (usage.last_used,)

    def evicted(self, rank: Rank) -> None:
        """Nothing is learnt from it."""


class LFU(LRU):
    """See the module."""

    def rank(self, usage: Usage, num_bytes: int) -> Rank:
        return (usage.num_uses, usage.last_used)


class LengthAware(LRU):
    """See the module."""

    def rank(self, usage: Usage, num_bytes: int) -> Rank:
        return (usage.num_uses, -usage.depth, usage.last_used)


class CostAware:
    """Owns the age of the tier: the highest rank that had to go. See the module."""

    def __init__(self) -> None:
        self._age = 0.0

    def rank(self, usage: Usage, num_bytes: int) -> Rank:
        saved_s = usage.recompute_s or ASSUMED_S_PER_TOKEN * max(1, usage.num_tokens)
        return (self._age + usage.num_uses * saved_s / max(1, num_bytes), usage.last_used)

    def evicted(self, rank: Rank) -> None:
        self._age = max(self._age, rank[0])


def policy_named(name: PolicyName) -> EvictionPolicy:
    """A new policy of that name."""
    policies: dict[PolicyName, type[EvictionPolicy]] = {
        "lru": LRU,
        "lfu": LFU,
        "length-aware": LengthAware,
        "cost-aware": CostAware,
    }
    return policies[name]()
