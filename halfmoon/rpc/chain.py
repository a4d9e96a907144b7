"""Where blocks for the store stand in their prompt, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Chain:
    """Of one block, or of the first of several successive ones."""

    parent: bytes = b""  # key of the block before it; empty: there is none
    depth: int = 0  # blocks before it
    recompute_s: float = 0.0  # what computing each took; 0: unknown
    ttl_s: float = 0.0  # 0: the store's own


class Stored(NamedTuple):
    """What became of successive blocks that were offered."""

    num_held: int  # leading ones that the store has now
    num_new: int  # of these that it did not have before
