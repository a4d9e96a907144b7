"""The catalog's entry of one block, and the change that it reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

from halfmoon.catalog.block_identity import BlockMeta
from halfmoon.policy.eviction import Rank, Usage


class Tier(IntEnum):
    """Tiers from fast to slow; a slower tier outlives the faster ones."""

    DRAM = 0
    DISK = 1
    COLD = 2


@dataclass(frozen=True, slots=True)
class Change:
    """A block entered a tier (`held`) or left it."""

    meta: BlockMeta
    tier: Tier
    held: bool
    tiers: tuple[Tier, ...]  # tiers that hold it after the change
    evicted: bool = False  # it was removed to make room
    first: bool = False  # no tier held it before
    rejected: bool = False  # the tier never admitted it, as far as others know

    @property
    def block(self) -> bytes:
        """Id of the block."""
        return self.meta.id

    @property
    def gone(self) -> bool:
        """Whether no tier holds it any more."""
        return not self.tiers


@dataclass(slots=True)
class Holding:
    """One tier's copy."""

    num_bytes: int
    rank: Rank


@dataclass(slots=True, eq=False)
class Entry:
    """One known block. Only the catalog changes it."""

    meta: BlockMeta
    usage: Usage
    tiers: dict[Tier, Holding] = field(default_factory=dict)
    children: set[bytes] = field(default_factory=set)
    num_children_in: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    pinned: bool = False
    num_holds: int = 0
    charged_bytes: int = 0  # to its tenant: its largest copy
    used_s: float = -math.inf  # when it was last used, by the catalog's callers' clock

    @property
    def fastest(self) -> Tier:
        """The fastest tier that holds it."""
        return min(self.tiers)

    def is_needed_in(self, tier: Tier) -> bool:
        """Whether blocks in faster tiers that follow it depend on this tier's copy alone."""
        others = [other for other in self.tiers if other != tier]
        slowest = max(others, default=-1)
        return any(num and slowest < child for child, num in self.num_children_in.items() if child <= tier)
