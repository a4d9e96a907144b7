"""What the failure of a tier changes: damage, a full disk, a cold tier that is slow or down."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from halfmoon.catalog.entry import Tier
from halfmoon.errors import DataLoss, NotFound, Unavailable
from halfmoon.rpc.breaker import CircuitBreaker
from services.kvstore.counts import TierCount
from services.kvstore.pool import Pool
from services.kvstore.tiers.record import Record
from tests.services.kvstore.blocks import is_right, put_chain
from tests.services.kvstore.cold_memory import ColdMemory
from tests.services.kvstore.pools import IDS, KEYS, pool, tiers


async def test_damage_in_one_tier_is_made_good_from_the_next(tmp_path: Path) -> None:
    cold = ColdMemory()
    async with pool(directory=tmp_path, cold=cold) as it:
        await put_chain(it, KEYS[:2])
        await it.settled()
        block = it.dram.acquire(IDS[0])
        block.room.view[3] ^= 1
        it.dram.release(block)
        damage(tmp_path)
        assert await is_right(it, IDS[0])
        assert Tier.COLD in tiers(it, IDS[0])
        assert [it.counts.by_tier[tier]["corrupted"] for tier in Tier] == [1, 1, 0]


def damage(directory: Path) -> None:
    """Flips a bit in every 512 bytes of every file."""
    for file in directory.glob("*.blocks"):
        data = bytearray(file.read_bytes())
        for place in range(100, len(data), 512):
            data[place] ^= 1
        file.write_bytes(data)


async def test_damage_everywhere_is_a_miss_and_takes_what_follows_along(tmp_path: Path) -> None:
    async with pool(directory=tmp_path) as it:
        await put_chain(it, KEYS[:3])
        await it.settled()
    damage(tmp_path)
    async with pool(directory=tmp_path) as it:
        with pytest.raises(DataLoss):
            await it.acquire(IDS[0])
        assert it.match(IDS[:3]) == []
        assert (it.counts.num_misses, it.counts.total("corrupted")) == (1, 1)


async def test_a_block_that_leaves_a_tier_during_its_read_is_a_miss_and_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool(directory=tmp_path) as it:
        await put_chain(it, KEYS[:2])
        await it.settled()
    async with pool(directory=tmp_path) as it:
        assert it.disk is not None
        read = it.disk.read

        async def read_after_a_drop(block: bytes) -> Record:
            await it.drop([block])
            return await read(block)

        monkeypatch.setattr(it.disk, "read", read_after_a_drop)
        with pytest.raises(NotFound):
            await it.acquire(IDS[0])
        assert (it.counts.num_misses, it.counts.total("corrupted")) == (1, 0)


async def test_a_full_disk_does_not_stop_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool(directory=tmp_path) as it:
        await put_chain(it, KEYS[:2])
        await it.settled()
        real = os.write

        def full(file: int, data: bytes) -> int:
            if len(data) > 64:  # a record; asyncio's own wake-ups go through
                raise OSError(28, "No space left on device")
            return real(file, data)

        monkeypatch.setattr(os, "write", full)
        await put_chain(it, KEYS[2:6])
        await until_counted(it, Tier.DISK, "failed", 2)
        assert [await is_right(it, block) for block in IDS[:6]] == [True] * 6
        assert it.num_waiting(Tier.DISK) > 0
        monkeypatch.undo()
        await it.settled()
        assert tiers(it, IDS[5]) == [Tier.DRAM, Tier.DISK]


async def until_counted(it: Pool, tier: Tier, what: TierCount, num: int) -> None:
    """Lets the pool's tasks run until it has counted that."""
    async with asyncio.timeout(20):
        while it.counts.by_tier[tier][what] < num:  # noqa: ASYNC110  # a count has no event
            await asyncio.sleep(0)


async def test_a_cold_tier_that_is_down_is_left_alone_and_comes_back(tmp_path: Path) -> None:
    cold = ColdMemory()
    async with pool(directory=tmp_path, cold=cold) as it:
        await put_chain(it, KEYS[:2])
        await it.settled()
        cold.is_down = True
        await put_chain(it, KEYS[2:4])
        await until_counted(it, Tier.COLD, "failed", 3)
        assert [await is_right(it, block) for block in IDS[:4]] == [True] * 4
        cold.is_down = False
        await it.settled()
        assert tiers(it, IDS[3]) == [Tier.DRAM, Tier.DISK, Tier.COLD]


async def test_what_only_a_dead_tier_has_is_a_miss_until_it_is_back(tmp_path: Path) -> None:
    cold = ColdMemory()
    async with pool(cold=cold) as it:
        await put_chain(it, KEYS[:2])
        await it.settled()
        for block in (IDS[1], IDS[0]):
            it.catalog.lose(block, Tier.DRAM)
        cold.is_down = True
        for _ in range(2):
            with pytest.raises(Unavailable):
                await it.acquire(IDS[0])
        assert it.counts.num_misses == 2
        assert tiers(it, IDS[0]) == [Tier.COLD], "an outage is no loss"
        cold.is_down = False
        await until_right(it, IDS[0])


async def until_right(it: Pool, block: bytes) -> None:
    while True:
        try:
            assert await is_right(it, block)
            return
        except Unavailable:
            continue


async def test_a_slow_cold_tier_times_out(tmp_path: Path) -> None:
    cold = ColdMemory()
    cold.is_slow = True
    async with pool(cold=cold) as it:
        await put_chain(it, KEYS[:2])
        await until_counted(it, Tier.COLD, "failed", 1)
        assert await is_right(it, IDS[1])


async def test_an_object_that_others_deleted_is_a_miss() -> None:
    cold = ColdMemory()
    async with pool(cold=cold) as it:
        await put_chain(it, KEYS[:1])
        await it.settled()
        it.catalog.lose(IDS[0], Tier.DRAM)
        cold.objects.clear()
        with pytest.raises(NotFound):
            await it.acquire(IDS[0])
        assert tiers(it, IDS[0]) == []


def test_a_breaker_opens_waits_longer_and_closes() -> None:
    breaker = CircuitBreaker(2, 1.0)
    breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert (breaker.allows(0.9), breaker.is_open(0.9), breaker.wait_s(0.75)) == (False, True, 0.25)
    assert breaker.allows(1.0)
    assert not breaker.allows(1.0), "one attempt at a time"
    breaker.failed(1.0)
    assert not breaker.allows(2.9)
    assert breaker.allows(3.0)
    breaker.succeeded()
    assert (breaker.allows(3.0), breaker.wait_s(3.0)) == (True, 0.0)
