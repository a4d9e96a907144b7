"""Three tiers as one: where blocks go, where they come back from, and what the failure of a tier changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from halfmoon.errors import DataLoss, Incompatible, NoCapacity, NotFound, Unavailable
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.layout import KVLayout
from halfmoon.rpc.breaker import CircuitBreaker
from services.kvstore.cold import ColdTier, object_name, parse_name
from services.kvstore.counts import TierCount
from services.kvstore.disk import DiskTier
from services.kvstore.entry import Tier
from services.kvstore.events import BlockEvent, Snapshot
from services.kvstore.identity import block_id
from services.kvstore.options import PoolOptions
from services.kvstore.pool import Pool
from tests.services.kvstore.blocks import LAYOUT, content, is_right, key, meta, put, put_chain, read
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
) -> AsyncIterator[Pool]:
    disk = None if directory is None else DiskTier(directory, disk_bytes)
    tier = None if cold is None else ColdTier(cold, cold_bytes, 0.2, CircuitBreaker(2, 0.01))
    quick = options or PoolOptions(sweep_s=0.01, cold_list_s=30.0, retry_pause_s=0.01, drain_s=0.0)
    it = Pool(memoryview(bytearray(num_blocks * LAYOUT.block_bytes)), quick, disk, tier, clock or Clock())
    async with it.running():
        yield it
        it.catalog.check_integrity()
        it.dram.check_integrity()


def tiers(it: Pool, block: bytes) -> list[Tier]:
    entry = it.catalog.get(block)
    return [] if entry is None else sorted(entry.tiers)


async def test_blocks_are_copied_down_and_come_back_after_a_restart(tmp_path: Path) -> None:
    async with pool(directory=tmp_path) as it:
        await put_chain(it, KEYS[:5])
        await it.settled()
        assert tiers(it, IDS[4]) == [Tier.DRAM, Tier.DISK]
    async with pool(directory=tmp_path) as it:
        assert [entry.fastest for entry in it.match(IDS[:6])] == [Tier.DISK] * 5
        assert [await is_right(it, block) for block in IDS[:5]] == [True] * 5
        assert tiers(it, IDS[0]) == [Tier.DRAM, Tier.DISK]
        assert it.counts.by_tier[Tier.DISK]["hits"] == 5


async def test_a_wiped_host_finds_its_blocks_in_the_cold_tier(tmp_path: Path) -> None:
    cold = ColdMemory()
    async with pool(directory=tmp_path / "a", cold=cold) as it:
        await put_chain(it, KEYS[:5])
        await it.settled()
        assert tiers(it, IDS[0]) == [Tier.DRAM, Tier.DISK, Tier.COLD]
    async with pool(directory=tmp_path / "b", cold=cold) as it:
        await cold.listed.wait()
        await until(lambda: len(it.match(IDS)) == 5, it)
        assert [await is_right(it, block) for block in IDS[:5]] == [True] * 5
        with pytest.raises(Incompatible):
            it.reserve(meta(IDS[0], layout=KVLayout(1, 1, 2, "float16", 4)))


async def until(condition: Callable[[], bool], it: Pool) -> None:
    """Waits for a change that makes `condition()` true."""
    reader = it.events.subscribe()
    try:
        while not condition():
            await reader.next()
    finally:
        reader.close()


async def test_what_memory_has_no_room_for_is_read_from_the_disk(tmp_path: Path) -> None:
    async with pool(4, tmp_path) as it:
        for n in range(12):
            await put_chain(it, [KEYS[n]])
            await it.settled()
        assert it.catalog.num_blocks(Tier.DRAM) == 4
        assert [await is_right(it, block) for block in IDS[:12]] == [True] * 12
        assert it.catalog.num_blocks(Tier.DRAM) == 4


async def test_a_reader_gets_its_block_though_memory_is_full_of_loans(tmp_path: Path) -> None:
    async with pool(2, tmp_path) as it:
        for n in range(3):
            await put_chain(it, [KEYS[n]])
            await it.settled()
        loans = [await it.acquire(block) for block in IDS[1:3]]
        assert all(loan.block is not None for loan in loans)
        third = await it.acquire(IDS[0])
        assert third.block is None
        assert bytes(third.cells()) == content(KEYS[0])
        with pytest.raises(NoCapacity):
            it.reserve(meta(IDS[9]))
        for loan in (*loans, third):
            it.give_back(loan)


async def test_the_end_waits_for_what_is_to_be_copied(tmp_path: Path) -> None:
    async with pool(directory=tmp_path, options=PoolOptions(drain_s=60.0)) as it:
        await put_chain(it, KEYS[:6])
    async with pool(directory=tmp_path) as it:
        assert len(it.match(IDS)) == 6


async def test_prefetch_fills_memory_once_for_all_who_ask(tmp_path: Path) -> None:
    async with pool(directory=tmp_path) as it:
        await put_chain(it, KEYS[:4])
        await it.settled()
    async with pool(directory=tmp_path) as it:
        assert it.prefetch(IDS[:5]) == it.prefetch(IDS[:5]) == 4
        await until(lambda: it.catalog.num_blocks(Tier.DRAM) == 4, it)
        assert it.counts.by_tier[Tier.DISK]["hits"] == 4


@pytest.mark.parametrize("codec", ["raw", "zstd", "int8", "int4+zstd"])
async def test_each_tier_may_have_its_codec(tmp_path: Path, codec: str) -> None:
    options = PoolOptions(dram_codec=EntryCodec.parse("lz4"), disk_codec=EntryCodec.parse(codec))
    async with pool(directory=tmp_path, options=options) as it:
        await put_chain(it, KEYS[:3])
        await it.settled()
        assert await is_right(it, IDS[2])
    async with pool(directory=tmp_path, options=options) as it:
        assert (await read(it, IDS[0]) == content(KEYS[0])) == (codec in ("raw", "zstd"))
        first = await read(it, IDS[0])
        it.catalog.lose(IDS[0], Tier.DRAM)
        assert await read(it, IDS[0]) == first


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


async def test_the_slow_tiers_keep_to_their_budgets(tmp_path: Path) -> None:
    cold = ColdMemory()
    size = 3 * LAYOUT.block_bytes
    async with pool(32, tmp_path, cold, disk_bytes=20 * LAYOUT.block_bytes, cold_bytes=size) as it:
        for n in range(32):
            await put_chain(it, [KEYS[n]])
        await it.settled()
        assert it.disk is not None
        assert 0 < it.catalog.used_bytes(Tier.DISK) <= it.disk.live_budget_bytes
        assert it.disk.file_bytes <= 20 * LAYOUT.block_bytes
        assert it.catalog.used_bytes(Tier.COLD) <= size
        assert it.cold is not None
        await it.cold.sweep()
        assert 0 < sum(map(len, cold.objects.values())) <= size


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


async def test_a_dropped_block_is_gone_from_every_tier_for_good(tmp_path: Path) -> None:
    cold = ColdMemory()
    async with pool(directory=tmp_path, cold=cold) as it:
        await put_chain(it, KEYS[:3])
        await it.settled()
        assert await it.drop([IDS[1]]) == 2
        assert len(it.match(IDS[:3])) == 1
        assert it.cold is not None
        await it.cold.sweep()
    assert len(cold.objects) == 1
    async with pool(directory=tmp_path, cold=cold) as it:
        await cold.listed.wait()
        assert len(it.match(IDS[:3])) == 1


async def test_blocks_expire_and_pinned_ones_do_not(tmp_path: Path) -> None:
    clock = Clock()
    async with pool(directory=tmp_path, clock=clock) as it:
        for n in range(3):
            await put(it, meta(IDS[n]), ttl_s=60)
        await it.pin([IDS[2]], True)
        await it.settled()
        clock.now_s += 61
        with pytest.raises(NotFound):
            await it.acquire(IDS[0])
        await until(lambda: IDS[0] not in it.catalog, it)
        assert await is_right(it, IDS[2])
    async with pool(directory=tmp_path, clock=clock) as it:
        assert [entry.meta.id for entry in it.catalog] == [IDS[2]]
        assert await is_right(it, IDS[2])


async def test_a_pin_from_before_the_copy_lasts_beyond_a_restart(tmp_path: Path) -> None:
    async with pool(directory=tmp_path) as it:
        await put_chain(it, KEYS[:1])
        assert await it.pin([IDS[0], IDS[9]], True) == 1
        await it.settled()
    async with pool(directory=tmp_path) as it:
        entry = it.catalog.get(IDS[0])
        assert entry is not None
        assert entry.pinned


async def test_tenants_neither_read_nor_probe_each_other() -> None:
    async with pool() as it:
        mine = await put_chain(it, KEYS[:2], salt=b"mine")
        for salt in (b"", b"yours"):
            theirs = [block_id(one, salt) for one in KEYS[:2]]
            assert it.match(theirs) == []
            assert await it.drop(theirs) == 0
            with pytest.raises(NotFound):
                await it.acquire(theirs[0])
            with pytest.raises(NotFound):
                it.reserve(meta(theirs[1], theirs[0], 1))
        assert len(it.match(mine)) == 2
        assert await it.drop(mine[:1]) == 2


async def test_events_are_numbered_without_gaps_and_add_up(tmp_path: Path) -> None:
    async with pool(4, tmp_path) as it:
        await put_chain(it, KEYS[:1])
        reader = it.events.subscribe()
        first = await reader.next()
        assert isinstance(first, Snapshot)
        known = dict(first.blocks)
        for n in range(1, 8):
            await put_chain(it, [KEYS[n]])
            await it.settled()
        await it.drop([IDS[0]])
        events = await reader.next()
        assert isinstance(events, list)
        assert [event.sequence for event in events] == [first.sequence + 1 + n for n in range(len(events))]
        for event in events:
            apply(known, event)
        assert known == {entry.meta.id: tuple(sorted(entry.tiers)) for entry in it.catalog}
        assert {event.kind for event in events} == {"stored", "moved", "evicted"}
        reader.close()


def apply(known: dict[bytes, tuple[Tier, ...]], event: BlockEvent) -> None:
    assert (event.block in known) == (event.kind != "stored")
    assert bool(event.tiers) == (event.kind != "evicted")
    known[event.block] = event.tiers
    if not event.tiers:
        del known[event.block]


async def test_a_reader_that_falls_behind_gets_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvstore.events.MAX_BEHIND", 3)
    async with pool() as it:
        reader = it.events.subscribe()
        assert await reader.next() == Snapshot(0, [])
        await put_chain(it, KEYS[:5])
        assert await reader.next() == Snapshot(5, [(block, (Tier.DRAM,)) for block in IDS[:5]])
        await put_chain(it, KEYS[5:6])
        assert await reader.next() == [BlockEvent(6, "stored", IDS[5], (Tier.DRAM,))]


def test_names_of_objects_say_which_block_they_are() -> None:
    for wanted in (meta(IDS[0]), meta(block_id(KEYS[1], b"salt"), block_id(KEYS[0], b"salt"), 7)):
        got = parse_name(object_name(wanted))
        assert got is not None
        assert (got.id, got.parent, got.depth) == (wanted.id, wanted.parent, wanted.depth)
    for other in ("", "halfmoon-kv-v1/x", object_name(meta(IDS[0])) + "0x", "else/" + object_name(meta(IDS[0]))):
        assert parse_name(other) is None


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
