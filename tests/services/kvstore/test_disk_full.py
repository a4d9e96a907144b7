"""A disk that really is full: a process whose files may not grow serves on from memory, SQLite's failures included."""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
from pathlib import Path

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from services.kvstore.options import PoolOptions
from services.kvstore.pool import Pool
from services.kvstore.tiers.disk import DiskTier
from tests.services.kvstore.blocks import LAYOUT, is_right, key, put_chain

NUM_BLOCKS = 400
LIMIT_BYTES = 40 * LAYOUT.block_bytes  # of any one file, SQLite's log too


def test_a_store_on_a_full_disk_serves_from_memory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=_live, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 0
    asyncio.run(_inspect(tmp_path))


def _live(directory: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, LIMIT_BYTES))
    asyncio.run(_serve(directory))


async def _serve(directory: Path) -> None:
    memory = memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes))
    disk = DiskTier(directory, 2 * NUM_BLOCKS * LAYOUT.block_bytes)
    pool = Pool(memory, PoolOptions(sweep_s=0.001, retry_pause_s=0.001, drain_s=0.0), disk)
    async with pool.running():
        for n in range(NUM_BLOCKS):
            await put_chain(pool, [key(n)])
            await asyncio.sleep(0)
        while pool.counts.by_tier[Tier.DISK]["failed"] < 3:  # noqa: ASYNC110  # a count has no event
            await asyncio.sleep(0)
        for n in range(NUM_BLOCKS):
            assert await is_right(pool, block_id(key(n)))


async def _inspect(directory: Path) -> None:
    """With room again, what had reached the disk is right, and more fits."""
    pool = Pool(memoryview(bytearray(1 << 20)), disk=DiskTier(directory, 2 * NUM_BLOCKS * LAYOUT.block_bytes))
    async with pool.running():
        for entry in pool.catalog:
            assert await is_right(pool, entry.meta.id)
        [block] = await put_chain(pool, [key(NUM_BLOCKS)])
        await pool.settled()
        assert pool.catalog.is_in(block, Tier.DISK)
