"""Where blocks for the store stand in their prompt, and how storing them ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from halfmoon.kv.owner import SHARED, KVOwner


@dataclass(frozen=True, slots=True)
class Chain:
    """The position of one block, or of the first of several successive ones."""

    parent: bytes = b""  # key of the block before it; empty for the first block
    depth: int = 0  # number of blocks before it
    recompute_s: float = 0.0  # time to compute each block; 0: unknown
    owner: KVOwner = SHARED  # who is charged for blocks that are new to the store


class Stored(NamedTuple):
    """Outcome for successive blocks that were offered."""

    num_held: int  # leading blocks that the store has now
    num_new: int  # of these, how many are new to it
