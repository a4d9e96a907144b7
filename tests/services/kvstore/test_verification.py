"""What is damaged is found in each tier and dropped there alone; what leaves meanwhile is not damage."""

from __future__ import annotations

import asyncio
from pathlib import Path

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from halfmoon.rpc.breaker import CircuitBreaker
from services.kvstore.options import PoolOptions
from services.kvstore.pool import Pool
from services.kvstore.tiers.cold import ColdTier
from services.kvstore.tiers.disk import DiskTier
from tests.services.kvstore.blocks import LAYOUT, key, meta, put_chain
from tests.services.kvstore.cold_memory import ColdMemory

KEYS = [key(n) for n in range(4)]
IDS = [block_id(one) for one in KEYS]


def three_tiers(directory: Path, cold: ColdMemory) -> Pool:
    quick = PoolOptions(sweep_s=0.01, cold_list_s=30.0, retry_pause_s=0.01, drain_s=0.0)
    tier = ColdTier(cold, 1 << 20, 0.2, CircuitBreaker(2, 0.01))
    return Pool(memoryview(bytearray(16 * LAYOUT.block_bytes)), quick, DiskTier(directory, 1 << 20), tier)


async def test_what_is_damaged_is_found_and_dropped(tmp_path: Path) -> None:
    cold = ColdMemory()
    async with three_tiers(tmp_path, cold).running() as pool:
        await put_chain(pool, KEYS[:2])
        await put_chain(pool, KEYS[2:4])
        await pool.settled()
        assert await pool.verify(list(Tier)) == dict.fromkeys(Tier, (4, 0))
        block = pool.dram.acquire(IDS[3])
        block.room.view[3] ^= 1
        pool.dram.release(block)
        assert pool.cold is not None
        cold.objects[pool.cold.name_of(meta(IDS[1], IDS[0], 1))] = b"?"
        assert await pool.verify(list(Tier)) == {Tier.DRAM: (4, 1), Tier.DISK: (4, 0), Tier.COLD: (4, 1)}
        assert [pool.counts.by_tier[tier]["corrupted"] for tier in Tier] == [1, 0, 1]
        held = {block: sorted(entry.tiers) for block in IDS if (entry := pool.catalog.get(block))}
        assert (held[IDS[3]], held[IDS[1]]) == ([Tier.DISK, Tier.COLD], [Tier.DRAM, Tier.DISK])


async def test_a_block_that_is_dropped_meanwhile_is_not_damaged(tmp_path: Path) -> None:
    async with three_tiers(tmp_path, ColdMemory()).running() as pool:
        await put_chain(pool, KEYS[:2])
        await pool.settled()
        verifying = asyncio.create_task(pool.verify([Tier.DISK]))
        await asyncio.sleep(0)  # it has begun to read the first one
        await pool.drop([IDS[1]])
        assert await verifying == {Tier.DISK: (2, 0)}
        assert pool.counts.by_tier[Tier.DISK]["corrupted"] == 0
