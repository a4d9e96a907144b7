"""Three tiers as one: where blocks go, and where they come back from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from halfmoon.errors import Incompatible, NoCapacity, NotFound
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.kv_layout import KVLayout
from services.kvstore.events import BlockEvent, Snapshot
from services.kvstore.options import PoolOptions
from services.kvstore.tiers.cold import object_name, parse_name
from tests.services.kvstore.blocks import LAYOUT, content, is_right, meta, put, put_chain, read
from tests.services.kvstore.cold_memory import ColdMemory
from tests.services.kvstore.pools import IDS, KEYS, Clock, pool, tiers, until


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
        it.options = replace(it.options, ttl_s=60.0)
        for n in range(3):
            await put(it, meta(IDS[n]))
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
    for other in ("", "a/x", object_name(meta(IDS[0])) + "0x", "else/" + object_name(meta(IDS[0]))):
        assert parse_name(other) is None
