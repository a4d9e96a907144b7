"""A tenant above its quota of KV bytes makes room with its own oldest blocks, in every tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from halfmoon.errors import NoCapacity
from halfmoon.kv.owner import SHARED, KVOwner
from services.kvstore.metrics import KVStoreMetrics
from services.kvstore.movement.incoming import Arrivals, Run, run_metas
from services.kvstore.pool import Pool
from services.kvstore.servicer import stats_message
from services.kvstore.tiers.record import HEADER_BYTES
from tests.services.kvstore.blocks import LAYOUT, content, is_right, key
from tests.services.kvstore.cold_memory import ColdMemory
from tests.services.kvstore.pools import pool

BYTES = LAYOUT.block_bytes
RECORD_BYTES = BYTES + HEADER_BYTES
ALICE, BOB = KVOwner("alice", 4 * RECORD_BYTES), KVOwner("bob")


def keys(tenant: int, num: int, start: int = 0) -> list[bytes]:
    return [key(tenant, n) for n in range(start, start + num)]


async def offer(it: Pool, owner: KVOwner, blocks: list[bytes], parent: bytes = b"", depth: int = 0) -> int:
    """Offers a run as a worker does; gives how many of its blocks are here then."""
    metas = run_metas(blocks, parent, depth, b"", LAYOUT, 0.0, owner)
    async with Arrivals(it).expecting(Run(metas, owner)) as arrival:
        for draft in arrival.drafts:
            draft.room.view[:] = content(draft.meta.id)
            await it.commit(draft)
        return arrival.num_here + len(arrival.drafts)


async def put_each(it: Pool, owner: KVOwner, blocks: list[bytes]) -> None:
    """Stores prompts of one block."""
    for one in blocks:
        assert await offer(it, owner, [one]) == 1


def held(it: Pool, blocks: list[bytes]) -> list[bool]:
    return [block_id(one) in it.catalog for one in blocks]


async def test_its_own_oldest_blocks_make_room_and_nobody_elses(tmp_path: Path) -> None:
    cold = ColdMemory()
    async with pool(directory=tmp_path, cold=cold) as it:
        await put_each(it, BOB, keys(2, 4))
        await put_each(it, ALICE, keys(1, 4))
        await it.settled()
        assert it.match([block_id(key(1, 0))]), "used now"
        await put_each(it, ALICE, keys(1, 2, start=4))
        assert held(it, keys(1, 6)) == [True, False, False, True, True, True]
        assert held(it, keys(2, 4)) == [True] * 4
        accounts = {account.tenant: account for account in it.catalog.tenants}
        assert accounts["alice"].used_bytes <= ALICE.quota_bytes
        assert accounts["alice"].num_evicted == 2
        await it.settled()
        assert it.cold is not None
        await it.cold.sweep()
        assert len(cold.objects) == 8, "from every tier"
    async with pool(directory=tmp_path) as it:
        assert {account.tenant: account.num_blocks for account in it.catalog.tenants} == {"alice": 4, "bob": 4}
        await put_each(it, ALICE, keys(1, 1, start=9))
        assert {account.tenant: account.num_blocks for account in it.catalog.tenants} == {"alice": 4, "bob": 4}


async def test_a_copy_in_each_tier_counts_once(tmp_path: Path) -> None:
    async with pool(directory=tmp_path, cold=ColdMemory()) as it:
        await put_each(it, BOB, keys(2, 3))
        await it.settled()
        [account] = it.catalog.tenants
        largest = max(holding.num_bytes for entry in it.catalog for holding in entry.tiers.values())
        assert (account.tenant, account.num_blocks, account.used_bytes) == ("bob", 3, 3 * largest)


async def test_of_a_prompt_above_the_quota_the_beginning_is_kept() -> None:
    async with pool() as it:
        assert await offer(it, ALICE, keys(1, 6)) == 4
        with pytest.raises(NoCapacity, match="alice"):
            it.reserve(run_metas([key(1, 4)], key(1, 3), 4, b"", LAYOUT, 0.0, ALICE)[0])
        assert held(it, keys(1, 6)) == [True] * 4 + [False] * 2
        assert it.dram.reserved_bytes == 0
        assert await offer(it, ALICE, keys(3, 2)) == 2
        assert held(it, keys(1, 4)) == [True, True, False, False], "its end went"


async def test_a_quota_that_is_lowered_counts_at_the_next_put() -> None:
    async with pool() as it:
        await put_each(it, ALICE, keys(1, 4))
        assert await offer(it, KVOwner("alice", RECORD_BYTES), keys(1, 1, start=3)) == 1, "it is here already"
        assert held(it, keys(1, 4)) == [False, False, False, True]
        await put_each(it, KVOwner("alice"), keys(1, 8))
        assert all(held(it, keys(1, 8))), "no limit any more"


async def test_pinned_blocks_stay_and_the_tenant_gets_no_more() -> None:
    async with pool() as it:
        await put_each(it, ALICE, keys(1, 4))
        await it.pin([block_id(one) for one in keys(1, 4)], True)
        assert await offer(it, ALICE, keys(1, 1, start=7)) == 0
        await put_each(it, BOB, keys(2, 1))
        assert await is_right(it, block_id(key(1, 0)))


async def test_what_is_shared_has_no_quota_and_a_full_store_evicts_fairly() -> None:
    async with pool(num_blocks=8) as it:
        await put_each(it, SHARED, keys(0, 2))
        await put_each(it, BOB, keys(2, 40))
        assert held(it, keys(0, 2)) != [False, False], "bob's flood pushes out bob's own first"


async def test_a_put_of_what_is_here_changes_neither_bytes_nor_owner() -> None:
    async with pool() as it:
        await put_each(it, BOB, keys(2, 1))
        metas = run_metas(keys(2, 1), b"", 0, b"", LAYOUT, 0.0, ALICE)
        async with Arrivals(it).expecting(Run(metas, ALICE)) as arrival:
            assert (arrival.num_here, list(arrival.drafts)) == (1, [])
        assert await is_right(it, block_id(key(2, 0)))
        assert [account.tenant for account in it.catalog.tenants] == ["bob"]


async def test_a_block_known_from_a_listing_is_its_tenants_once_it_was_read() -> None:
    cold = ColdMemory()
    async with pool(cold=cold) as it:
        await put_each(it, BOB, keys(2, 2))
        await it.settled()
    async with pool(cold=cold) as it:
        await cold.listed.wait()
        assert it.cold is not None
        for meta, num_bytes in await it.cold.list(5.0):
            if meta.id not in it.catalog:
                it.catalog.add(meta, Tier.COLD, num_bytes)
        assert [account.tenant for account in it.catalog.tenants] == [""]
        assert await is_right(it, block_id(key(2, 0)))
        assert {account.tenant: account.num_blocks for account in it.catalog.tenants} == {"": 1, "bob": 1}


async def test_statistics_and_metrics_name_few_tenants() -> None:
    async with pool(num_blocks=64) as it:
        for n in range(30):
            await put_each(it, KVOwner(f"tenant-{n:02}", 10 * BYTES), keys(n, 2 if n == 7 else 1))
        stats = stats_message(it)
        assert len(stats.tenants) == 30
        first = stats.tenants[0]
        assert (first.tenant, first.num_blocks, first.used_bytes) == ("tenant-07", 2, 2 * BYTES)
        assert first.quota_bytes == 10 * BYTES
        registry = KVStoreMetrics(it).registry
        [family] = [family for family in registry.collect() if family.name == "halfmoon_kvstore_tenant_bytes"]
        assert len(family.samples) == 21
        assert sum(sample.value for sample in family.samples) == 31 * BYTES
        assert family.samples[-1].labels == {"tenant": "(others)"}
