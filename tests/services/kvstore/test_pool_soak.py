"""Many hands on one pool whose tiers are all too small and whose cold tier fails at random: what is read is right."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from halfmoon.catalog.block_identity import block_id
from halfmoon.errors import HalfmoonError, NoCapacity, NotFound
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.rpc.breaker import CircuitBreaker
from services.kvstore.options import PoolOptions
from services.kvstore.pool import Pool
from services.kvstore.tiers.cold import ColdTier
from services.kvstore.tiers.disk import DiskTier
from tests.services.kvstore.blocks import LAYOUT, is_right, key, meta, put
from tests.services.kvstore.cold_memory import ColdMemory

NUM_PROMPTS, PROMPT_BLOCKS, NUM_STEPS, NUM_HANDS = 12, 6, 150, 4
PROMPTS = [[block_id(key(n, depth)) for depth in range(PROMPT_BLOCKS)] for n in range(NUM_PROMPTS)]


class Flaky(ColdMemory):
    """Fails every so often, by a seed."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    async def _arrive(self) -> None:
        await asyncio.sleep(0)
        if self._chance.random() < 0.1:
            raise ConnectionError("flaky")


async def work(pool: Pool, chance: random.Random) -> int:
    """One hand; gives how many blocks it read."""
    num_read = 0
    for _ in range(NUM_STEPS):
        prompt = chance.choice(PROMPTS)
        what = chance.random()
        if what < 0.45:
            await store(pool, prompt[: chance.randrange(1, PROMPT_BLOCKS + 1)], chance)
        elif what < 0.9:
            num_read += await read(pool, prompt)
        elif what < 0.95:
            await pool.drop([chance.choice(prompt)])
        else:
            await pool.pin([prompt[0]], chance.random() < 0.3)
        await asyncio.sleep(0)
    return num_read


async def store(pool: Pool, blocks: list[bytes], chance: random.Random) -> None:
    known = len(pool.match(blocks))
    for depth in range(known, len(blocks)):
        parent = blocks[depth - 1] if depth else None
        pool.options = replace(pool.options, ttl_s=chance.choice([math.inf, math.inf, 0.02]))
        try:
            await put(pool, meta(blocks[depth], parent, depth))
        except (NoCapacity, NotFound):  # full of what others read, or its beginning has gone
            return


async def read(pool: Pool, blocks: list[bytes]) -> int:
    found = pool.match(blocks)
    pool.prefetch(blocks)
    num_read = 0
    for entry in found:
        try:
            assert await is_right(pool, entry.meta.id)
        except HalfmoonError:
            break
        num_read += 1
    return num_read


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_read_is_right_whatever_happens_at_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    options = PoolOptions(
        dram_policy="cost-aware",
        disk_policy="length-aware",
        cold_policy="lfu",
        dram_codec=EntryCodec.parse(chance.choice(["raw", "lz4"])),
        disk_codec=EntryCodec.parse(chance.choice(["raw", "zstd"])),
        cold_codec=EntryCodec.parse("zstd"),
        sweep_s=0.001,
        cold_list_s=0.01,
        retry_pause_s=0.001,
        drain_s=0.0,
    )
    size = LAYOUT.block_bytes
    for _ in range(2):  # the second time with what the first one left on disk
        cold = ColdTier(Flaky(chance), 30 * size, 5.0, CircuitBreaker(2, 0.001))
        pool = Pool(memoryview(bytearray(12 * size)), options, DiskTier(tmp_path, 40 * size), cold)
        async with pool.running():
            pool.catalog.check_integrity()
            read_by = await asyncio.gather(*(work(pool, random.Random(chance.random())) for _ in range(NUM_HANDS)))
            assert sum(read_by) > 50
            assert pool.counts.total("corrupted") == 0
            pool.catalog.check_integrity()
        assert [entry.num_holds for entry in pool.catalog if entry.num_holds] == []
        pool.dram.check_integrity()
        assert pool.dram.reserved_bytes == 0
