"""A cold tier that is down, hangs or is full: serving does not wait for it, and it comes back by itself."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from halfmoon.catalog.entry import Tier
from halfmoon.errors import Unavailable
from halfmoon.rpc.breaker import CircuitBreaker
from services.kvstore.movement.demotion import MAX_TRIES
from services.kvstore.options import PoolOptions
from services.kvstore.pool import Pool
from services.kvstore.tiers.cold import ColdTier
from services.kvstore.tiers.disk import DiskTier
from tests.services.kvstore.blocks import LAYOUT, is_right, meta, put_chain
from tests.services.kvstore.cold_memory import ColdMemory
from tests.services.kvstore.pools import IDS, KEYS, pool, tiers


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.msg for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_cold_tier_that_hangs_holds_up_neither_puts_nor_the_disk(tmp_path: Path) -> None:
    cold = ColdMemory()
    tier = ColdTier(cold, 1 << 20, 3600.0, CircuitBreaker(2, 0.01))
    options = PoolOptions(sweep_s=3600.0, cold_list_s=3600.0, retry_pause_s=0.01, drain_s=0.0)
    it = Pool(memoryview(bytearray(64 * LAYOUT.block_bytes)), options, DiskTier(tmp_path, 1 << 20), tier)
    async with it.running():
        for n in range(24):
            await put_chain(it, KEYS[n : n + 1])
        await it.settled()
        for block in IDS[:20]:
            it.catalog.lose(block, Tier.DRAM)
            it.catalog.lose(block, Tier.DISK)
        cold.is_slow = True
        waiting = [asyncio.create_task(it.acquire(block)) for block in IDS[:20]]
        await asyncio.sleep(0)
        for block in IDS[20:24]:
            it.catalog.lose(block, Tier.DRAM)
            assert await is_right(it, block), "from disk"
        await put_chain(it, KEYS[30:32])
        assert await is_right(it, IDS[31])
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_an_outage_is_said_once_and_ends_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    cold = ColdMemory()
    async with pool(cold=cold) as it:
        await cold.listed.wait()
        cold.is_down = True
        await put_chain(it, KEYS[:4])
        while it.counts.by_tier[Tier.COLD]["failed"] < 4:  # noqa: ASYNC110  # a count has no event
            await asyncio.sleep(0)
        assert "ConnectionError" in it.trouble(Tier.COLD)
        assert sorted(warnings(caplog)) == ["cold.failing", "demotion.failed"]
        cold.is_down = False
        await it.settled()
        assert it.trouble(Tier.COLD) == ""
        assert tiers(it, IDS[3]) == [Tier.DRAM, Tier.COLD]
        assert len(warnings(caplog)) == 2


@pytest.mark.parametrize("num_refused", [1, 3, 5])
async def test_blocks_that_failed_alone_are_tried_again(num_refused: int) -> None:
    """With their successors, which the tier does not admit without them."""
    cold = ColdMemory()
    tier = ColdTier(cold, 1 << 20, 3600.0, CircuitBreaker(100, 0.01))
    options = PoolOptions(sweep_s=3600.0, cold_list_s=3600.0, retry_pause_s=0.0, drain_s=0.0)
    it = Pool(memoryview(bytearray(16 * LAYOUT.block_bytes)), options, None, tier)
    async with it.running():
        cold.num_refused = num_refused
        await put_chain(it, KEYS[:6])
        await it.settled()
        assert cold.num_refused == 0
        assert it.counts.by_tier[Tier.COLD]["failed"] == num_refused
        assert [tiers(it, block) for block in IDS[:6]] == [[Tier.DRAM, Tier.COLD]] * 6


async def test_a_block_that_fails_whenever_others_are_stored_is_given_up() -> None:
    cold = RefusingMemory()
    tier = ColdTier(cold, 1 << 20, 3600.0, CircuitBreaker(1_000_000, 0.01))
    options = PoolOptions(sweep_s=3600.0, cold_list_s=3600.0, retry_pause_s=0.0, drain_s=0.0)
    it = Pool(memoryview(bytearray(16 * LAYOUT.block_bytes)), options, None, tier)
    async with it.running():
        cold.refused = tier.name_of(meta(IDS[0]))
        await put_chain(it, KEYS[:1])
        for n in range(1, MAX_TRIES + 1):
            await put_chain(it, KEYS[n : n + 1])
            while Tier.COLD not in tiers(it, IDS[n]):  # noqa: ASYNC110
                await asyncio.sleep(0)
        await it.settled()
        assert tiers(it, IDS[0]) == [Tier.DRAM]
        assert it.counts.by_tier[Tier.COLD]["skipped"] == 1
        assert it.trouble(Tier.COLD) == ""


class RefusingMemory(ColdMemory):
    """Refuses one object."""

    refused = ""

    async def put(self, name: str, data: bytes) -> None:
        if name == self.refused:
            raise ConnectionError("refused")
        await super().put(name, data)


async def test_a_full_cold_tier_is_read_on_and_not_hammered() -> None:
    cold = ColdMemory()
    options = PoolOptions(sweep_s=0.01, cold_list_s=3600.0, retry_pause_s=3600.0, drain_s=0.0)
    async with pool(cold=cold, options=options) as it:
        await put_chain(it, KEYS[:2])
        await it.settled()
        it.catalog.lose(IDS[1], Tier.DRAM)
        cold.is_full = True
        num_puts = cold.num_puts
        await put_chain(it, KEYS[8:9])
        while not it.trouble(Tier.COLD):  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(3):
            assert await is_right(it, IDS[1]), "a read that works does not end the pause of writes"
            it.catalog.lose(IDS[1], Tier.DRAM)
            await put_chain(it, KEYS[9:10])
        assert cold.num_puts == num_puts + 1
        assert it.num_waiting(Tier.COLD) == 2


async def test_a_read_of_a_dead_tier_is_given_up_soon() -> None:
    cold = ColdMemory()
    async with pool(cold=cold) as it:
        await put_chain(it, KEYS[:3])
        await it.settled()
        for block in reversed(IDS[:3]):
            it.catalog.lose(block, Tier.DRAM)
        cold.is_slow = True
        results = await asyncio.gather(*(it.acquire(block) for block in IDS[:3]), return_exceptions=True)
        assert [type(result) for result in results] == [Unavailable] * 3
        assert cold.objects, "an outage is no loss"


async def test_a_sweep_waits_for_what_another_one_is_deleting() -> None:
    cold = ColdMemory()
    tier = ColdTier(cold, 1 << 20, 5.0, CircuitBreaker(2, 0.01))
    block = meta(IDS[0])
    await tier.put(block, b"record")
    tier.forget(block)
    other = asyncio.create_task(tier.sweep())
    await asyncio.sleep(0)  # the other one is deleting
    await tier.sweep()
    assert not cold.objects
    await other
