"""Options of a pool's tiers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.policy.eviction import PolicyName

PLAIN = EntryCodec()


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Policies, codecs and times of the tiers."""

    dram_policy: PolicyName = "cost-aware"
    disk_policy: PolicyName = "cost-aware"
    cold_policy: PolicyName = "cost-aware"
    dram_codec: EntryCodec = PLAIN
    disk_codec: EntryCodec = PLAIN
    cold_codec: EntryCodec = PLAIN
    ttl_s: float = math.inf
    sweep_s: float = 1.0  # interval of checks for blocks that expired or are to be deleted
    cold_list_s: float = 60.0  # between listings of the cold tier, which others may fill; also their time limit
    retry_pause_s: float = 1.0  # first pause of a tier that failed
    replica_cool_s: float = 300.0  # a replica unused for this long is dropped
    drain_s: float = 2.0  # limit on waiting at the end for copies to slower tiers
