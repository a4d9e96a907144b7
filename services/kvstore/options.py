"""How a pool's tiers behave."""

from __future__ import annotations

import math
from dataclasses import dataclass

from halfmoon.config.stores import PolicyName
from halfmoon.kv.entry_codec import EntryCodec

PLAIN = EntryCodec()


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How the tiers behave."""

    dram_policy: PolicyName = "lru"
    disk_policy: PolicyName = "lru"
    cold_policy: PolicyName = "lru"
    dram_codec: EntryCodec = PLAIN
    disk_codec: EntryCodec = PLAIN
    cold_codec: EntryCodec = PLAIN
    ttl_s: float = math.inf
    sweep_s: float = 1.0  # between looks for what has expired or is to be deleted
    cold_list_s: float = 60.0  # between lists of the cold tier, which others may fill, too; also a list's time limit
    retry_pause_s: float = 1.0  # how long a tier that failed is left alone at first
    replica_cool_s: float = 300.0  # a copy of another store's block is dropped when nobody used it for so long
    drain_s: float = 2.0  # how long the end waits for what is still to be copied down
