"""What the catalog knows of one block, and what it tells of a change."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from services.kvstore.catalog.block_identity import BlockMeta
from services.kvstore.catalog.eviction import Rank, Usage


class Tier(IntEnum):
    """From fast to slow; a slower tier outlives the faster ones."""

    DRAM = 0
    DISK = 1
    COLD = 2


@dataclass(frozen=True, slots=True)
class Change:
    """A block came into a tier (`held`), or left it."""

    meta: BlockMeta
    tier: Tier
    held: bool
    tiers: tuple[Tier, ...]  # where it is after the change
    evicted: bool = False  # it made room
    first: bool = False  # no tier had it before
    rejected: bool = False  # it never was in the tier, as far as others know

    @property
    def block(self) -> bytes:
        """Its id."""
        return self.meta.id

    @property
    def gone(self) -> bool:
        """Whether no tier has it any more."""
        return not self.tiers


@dataclass(slots=True)
class Holding:
    """A tier's copy."""

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

    @property
    def fastest(self) -> Tier:
        """The best place to read it from."""
        return min(self.tiers)
