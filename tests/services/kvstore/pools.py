"""Pools of few blocks, with quick sweeps, and what is asked of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from halfmoon.rpc.breaker import CircuitBreaker
from services.kvstore.options import PoolOptions
from services.kvstore.pool import Pool
from services.kvstore.tiers.cold import ColdTier
from services.kvstore.tiers.disk import DiskTier
from services.kvstore.tiers.seal import Seal
from tests.services.kvstore.blocks import LAYOUT, key
from tests.services.kvstore.cold_memory import ColdMemory

KEYS = [key(n) for n in range(64)]


IDS = [block_id(one) for one in KEYS]


class Clock:
    """A wall clock that is set."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def pool(
    num_blocks: int = 16,
    directory: Path | None = None,
    cold: ColdMemory | None = None,
    options: PoolOptions | None = None,
    disk_bytes: int = 1 << 20,
    cold_bytes: int = 1 << 20,
    clock: Clock | None = None,
    block_key: bytes | None = None,
) -> AsyncIterator[Pool]:
    disk = None if directory is None else DiskTier(directory, disk_bytes, Seal(block_key))
    tier = None if cold is None else ColdTier(cold, cold_bytes, 0.2, CircuitBreaker(2, 0.01), Seal(block_key))
    quick = options or PoolOptions(sweep_s=0.01, cold_list_s=30.0, retry_pause_s=0.01, drain_s=0.0)
    it = Pool(memoryview(bytearray(num_blocks * LAYOUT.block_bytes)), quick, disk, tier, clock or Clock())
    async with it.running():
        yield it
        it.catalog.check_integrity()
        it.dram.check_integrity()


def tiers(it: Pool, block: bytes) -> list[Tier]:
    entry = it.catalog.get(block)
    return [] if entry is None else sorted(entry.tiers)


async def until(condition: Callable[[], bool], it: Pool) -> None:
    """Waits for a change that makes `condition()` true."""
    reader = it.events.subscribe()
    try:
        while not condition():
            await reader.next()
    finally:
        reader.close()
