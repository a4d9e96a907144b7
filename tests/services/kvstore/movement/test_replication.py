"""Copies of another store's blocks: they come behind the call, count as copies, and go when nobody uses them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from halfmoon.errors import Forbidden, InvalidRequest, NoCapacity
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.kv_layout import KVBytes, KVLayout
from halfmoon.pb import kvstore_pb2_grpc
from halfmoon.rpc.server import running_server
from halfmoon.rpc.store.chain import Chain
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.rpc.transfer import KVIntake
from services.kvstore.bytes_servicer import KVBytesServicer
from services.kvstore.metrics import KVStoreMetrics
from services.kvstore.movement.incoming import Arrivals
from services.kvstore.movement.replication import MAX_WAITING, Replicator
from services.kvstore.movement.shared_memory_get import SharedMemoryGet
from services.kvstore.movement.shared_memory_put import SharedMemoryPut
from services.kvstore.options import PoolOptions
from services.kvstore.pool import Pool
from services.kvstore.servicer import KVStoreServicer
from services.kvstore.tiers.disk import DiskTier
from tests.services.kvstore.blocks import LAYOUT, content, key, meta, put

KEYS = [key(n) for n in range(6)]
SALT = b"somebody"


class _Everybody:
    def __contains__(self, address: object) -> bool:
        return True


EVERYBODY = _Everybody()


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Store:
    pool: Pool
    replicator: Replicator
    address: str
    client: KVStoreClient
    clock: Clock


@asynccontextmanager
async def store(
    disk: DiskTier | None = None, copying: bool = True, codec: str = "raw", peers: Container[str] = EVERYBODY
) -> AsyncIterator[Store]:
    clock, intake = Clock(), KVIntake()
    options = PoolOptions(sweep_s=3600, drain_s=0, replica_cool_s=60, dram_codec=EntryCodec.parse(codec))
    pool = Pool(memoryview(bytearray(32 * LAYOUT.block_bytes)), options, disk, now_s=clock)
    replicator, arrivals = Replicator(pool, peers=peers), Arrivals(pool)
    control = KVStoreServicer(pool, SharedMemoryGet(pool, 30, None), SharedMemoryPut(pool, arrivals), replicator)
    services = (
        lambda server: kvstore_pb2_grpc.add_KVStoreServicer_to_server(control, server),
        KVBytesServicer(pool, arrivals, intake, 30).registration(),
    )
    async with (
        pool.running(*([replicator.run()] if copying else [])),
        running_server("127.0.0.1:0", services, KVStoreMetrics(pool).rpc, grace_s=0) as server,
    ):
        client = KVStoreClient(f"127.0.0.1:{server.port}", SALT)
        yield Store(pool, replicator, f"127.0.0.1:{server.port}", client, clock)
        await client.close()
        pool.catalog.check_integrity()
        pool.dram.check_integrity()
    intake.close()


async def fill(of: Store, keys: list[bytes]) -> None:
    for depth, one in enumerate(keys):
        chain = Chain(parent=keys[depth - 1] if depth else b"", depth=depth)
        await of.client.put(one, LAYOUT, content(one), chain, deadline_s=10)


async def test_a_prompt_is_copied_behind_the_call() -> None:
    async with store() as origin, store() as near:
        await fill(origin, KEYS[:4])
        await fill(near, KEYS[:1])
        assert await near.client.replicate(origin.address, KEYS[:4], LAYOUT, deadline_s=10) == 3
        await near.replicator.settled()
        assert len(await near.client.match(KEYS, deadline_s=10)) == 4
        assert [bytes(await near.client.get(one, LAYOUT, deadline_s=10)) for one in KEYS[:4]] == [
            content(one) for one in KEYS[:4]
        ]
        stats = await near.client.stats(deadline_s=10)
        assert (stats.num_replicas, stats.num_replicated_total, stats.num_unreplicated_total) == (3, 3, 0)
        assert await near.client.replicate(origin.address, KEYS[:4], LAYOUT, deadline_s=10) == 0


async def test_it_copies_from_its_peers_alone() -> None:
    async with store() as origin, store(peers=("127.0.0.1:1",)) as near, store(peers=()) as alone:
        for one in (near, alone):
            with pytest.raises(Forbidden, match=f"--peers {origin.address}"):
                await one.client.replicate(origin.address, KEYS, LAYOUT, deadline_s=10)
        assert await near.client.replicate("127.0.0.1:1", KEYS, LAYOUT, deadline_s=10) == 6


async def test_what_the_other_store_lacks_ends_the_copy() -> None:
    async with store() as origin, store() as near:
        await fill(origin, KEYS[:2])
        assert await near.client.replicate(origin.address, KEYS, LAYOUT, deadline_s=10) == 6
        await near.replicator.settled()
        stats = await near.client.stats(deadline_s=10)
        assert (stats.num_replicas, stats.num_unreplicated_total) == (2, 4)
        await near.client.replicate("127.0.0.1:1", KEYS, LAYOUT, deadline_s=10)  # nobody is there
        await near.replicator.settled()
        assert (await near.client.stats(deadline_s=10)).num_unreplicated_total == 8


async def test_copies_that_nobody_uses_are_dropped_and_others_are_not(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 1 << 20)
    async with store() as origin, store(disk) as near:
        await fill(origin, KEYS)
        await near.client.replicate(origin.address, KEYS, LAYOUT, deadline_s=10)
        await near.replicator.settled()
        await near.pool.settled()
        ids = [block_id(one, SALT) for one in KEYS]
        assert not any(near.pool.catalog.is_in(block, Tier.DISK) for block in ids)  # the other store has them
        await put(near.pool, meta(ids[1], ids[0], 1))  # a worker beside this store has computed it, too
        await near.pool.settled()
        near.pool._maintenance.drop_cooled()
        near.clock.now_s += 59
        await near.client.match(KEYS[:4], deadline_s=10)  # a use
        near.pool._maintenance.drop_cooled()
        near.clock.now_s += 59
        near.pool._maintenance.drop_cooled()
        assert [block in near.pool.catalog for block in ids] == [True] * 4 + [False] * 2
        near.clock.now_s += 2
        near.pool._maintenance.drop_cooled()
        assert [block in near.pool.catalog for block in ids] == [True] * 2 + [False] * 4
        assert (await near.client.stats(deadline_s=10)).num_cooled_total == 4


async def test_what_a_worker_brings_while_its_copy_is_encoded_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, began, goes_on = EntryCodec.encode, threading.Event(), threading.Event()

    def first_waits(codec: EntryCodec, cells: KVBytes, layout: KVLayout) -> KVBytes:
        if not began.is_set():
            began.set()
            assert goes_on.wait(20)
        return encode(codec, cells, layout)

    block = block_id(KEYS[0], SALT)
    async with store() as origin, store(codec="lz4") as near:
        await fill(origin, KEYS[:1])
        monkeypatch.setattr(EntryCodec, "encode", first_waits)
        await near.client.replicate(origin.address, KEYS[:1], LAYOUT, deadline_s=10)
        assert await asyncio.to_thread(began.wait, 20)
        await put(near.pool, meta(block))
        goes_on.set()
        await near.replicator.settled()
        assert (len(near.pool.replicas), near.pool.counts.num_replicated) == (0, 0)
        near.clock.now_s += 61
        near.pool._maintenance.drop_cooled()
        assert block in near.pool.catalog


async def test_a_copy_that_is_dropped_while_the_block_behind_it_is_encoded_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [key(n) for n in range(12)]  # more than int2 leaves as they are at a prompt's end
    encode, began, goes_on = EntryCodec.encode, threading.Event(), threading.Event()

    def waits(codec: EntryCodec, cells: KVBytes, layout: KVLayout) -> KVBytes:
        began.set()
        assert goes_on.wait(20)
        return encode(codec, cells, layout)

    async with store() as origin, store(codec="int2") as near:
        await fill(origin, keys)
        monkeypatch.setattr(EntryCodec, "encode", waits)
        await near.client.replicate(origin.address, keys, LAYOUT, deadline_s=10)
        assert await asyncio.to_thread(began.wait, 20)
        await near.pool.drop([block_id(KEYS[0], SALT)])
        goes_on.set()
        await near.replicator.settled()
        assert not list(near.pool.catalog)


async def test_fragments_of_several_stores_come_together_and_copies_take_half_at_most() -> None:
    keys = [key(n) for n in range(24)]
    async with store() as one, store() as other, store() as near:
        await fill(one, keys)
        await one.pool.drop([block_id(keys[10], SALT)])
        await fill(other, keys)
        await near.client.replicate(one.address, keys[:14], LAYOUT, deadline_s=10)
        await near.replicator.settled()
        assert list(near.pool.find([block_id(one, SALT) for one in keys])) == list(range(10))
        await near.client.replicate(other.address, keys, LAYOUT, deadline_s=10)
        await near.replicator.settled()
        assert list(near.pool.find([block_id(one, SALT) for one in keys])) == list(range(16)), "of 32"
        near.pool.catalog.check_integrity()


async def test_an_error_of_ours_ends_one_copy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store() as origin, store() as near:
        await fill(origin, KEYS[:1])
        with monkeypatch.context() as patch:
            patch.setattr(near.pool, "reserve", None)
            await near.client.replicate(origin.address, KEYS[:1], LAYOUT, deadline_s=10)
            await near.replicator.settled()
        await near.client.replicate(origin.address, KEYS[:1], LAYOUT, deadline_s=10)
        await near.replicator.settled()
        assert len(near.pool.replicas) == 1


async def test_what_is_asked_is_bounded_and_checked() -> None:
    async with store() as origin, store(copying=False) as near:
        with pytest.raises(InvalidRequest, match="the source is missing"):
            await near.client.replicate("", KEYS, LAYOUT, deadline_s=10)
        for _ in range(MAX_WAITING):
            await near.client.replicate(origin.address, KEYS, LAYOUT, deadline_s=10)
        with pytest.raises(NoCapacity):
            await near.client.replicate(origin.address, KEYS, LAYOUT, deadline_s=10)
