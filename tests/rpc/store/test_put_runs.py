"""Runs of blocks into a real store, out of the writer's memory and over the wire: each block once, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from halfmoon.catalog.block_identity import block_id
from halfmoon.errors import DataLoss, HalfmoonError, Incompatible, InvalidRequest, NoCapacity
from halfmoon.kv.kv_layout import KVBytes
from halfmoon.kv.owner import KVOwner
from halfmoon.pb import kvstore_pb2, kvstore_pb2_grpc
from halfmoon.rpc.layout_message import layout_message
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.store import outbox
from halfmoon.rpc.store.block_streams import whole_blocks
from halfmoon.rpc.store.chain import Chain, Stored
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.rpc.transfer import transfer_to
from halfmoon.rpc.transport.limiter import WallClock
from halfmoon.rpc.transport.link import LinkSettings
from halfmoon.rpc.transport.memfd import host_id
from tests.rpc.store.test_kvstore_client import client, served
from tests.services.kvstore.blocks import LAYOUT, content, key

KEYS = [key(n) for n in range(9)]
IDS = [block_id(one) for one in KEYS]
LIMIT_S = 20.0

either_way = pytest.mark.parametrize("settings", [LinkSettings(("shm",)), LinkSettings(())], ids=["shm", "grpc"])


async def put(it: KVStoreClient, keys: Sequence[bytes] = KEYS, depth: int = 0) -> Stored:
    chain = Chain(KEYS[depth - 1] if depth else b"", depth, recompute_s=0.01)
    return await it.put_run(keys, LAYOUT, [content(one) for one in keys], chain, deadline_s=LIMIT_S)


class LaterClock(WallClock):
    later_s = 0.0

    def time(self) -> float:
        return super().time() + self.later_s


@either_way
async def test_a_run_is_there_at_once_and_comes_back(settings: LinkSettings) -> None:
    async with served() as (store, address), client(address, settings=settings) as it:
        assert await put(it, KEYS[:4]) == Stored(4, 4)
        assert await put(it, KEYS[4:], depth=4) == Stored(5, 5)
        assert [entry.meta.depth for entry in store.pool.match(IDS)] == list(range(9))
        assert store.pool.match(IDS)[5].meta.recompute_s == 0.01
        got = [bytes(cells) async for cells in it.get_run([*KEYS, key(99)], LAYOUT, deadline_s=LIMIT_S)]
        assert got == [content(one) for one in KEYS], "up to the first that is not there"
        store.pool.dram.check_integrity()


@either_way
async def test_what_is_there_is_not_put_again(settings: LinkSettings) -> None:
    async with served() as (store, address), client(address, settings=settings) as it:
        await put(it, KEYS[:4])
        stored = await put(it)
        assert 0 < stored.num_held - stored.num_new <= 4
        assert (await put(it, KEYS[4:], depth=4)).num_held > 0
        assert len(store.pool.match(IDS)) == 9
        assert store.pool.counts.num_stored == 9


@either_way
async def test_two_workers_that_bring_the_same_blocks_at_once_store_them_once(settings: LinkSettings) -> None:
    async with (
        served() as (store, address),
        client(address, settings=settings) as one,
        client(address, settings=settings) as other,
    ):
        both = await asyncio.gather(put(one), put(other))
        assert sum(stored.num_new for stored in both) == 9
        assert store.pool.counts.num_stored == 9
        assert store.pool.dram.reserved_bytes == 0


async def test_who_waits_for_a_sender_that_dies_brings_the_block() -> None:
    async with served() as (store, address), client(address) as it, Peer(address) as peer:
        body = kvstore_pb2.BlocksOpen(keys=KEYS[:1], layout=layout_message(LAYOUT)).SerializeToString()
        async with transfer_to(peer, LAYOUT, deadline_s=LIMIT_S, method="/halfmoon.KVStoreBytes/Put") as sender:
            await sender.open(whole_blocks(LAYOUT, 0, 1), body)
            waiting = asyncio.ensure_future(put(it))
            await it.stats(deadline_s=LIMIT_S)
            assert not waiting.done()
        assert await waiting == Stored(9, 9)
        store.pool.dram.check_integrity()


@either_way
async def test_a_store_without_room_for_all_takes_the_beginning(settings: LinkSettings) -> None:
    async with (
        served(dram_bytes=4 * LAYOUT.block_bytes) as (store, address),
        client(address, settings=settings) as it,
    ):
        assert await put(it) == Stored(4, 4)
        with pytest.raises(NoCapacity):
            await put(it, KEYS[4:], depth=4)
        assert len(store.pool.match(IDS)) == 4
        store.pool.dram.check_integrity()


async def test_a_store_that_cannot_reach_the_memory_gets_the_blocks_by_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (store, address), client(address) as it:
        monkeypatch.setattr("halfmoon.rpc.transport.mapped.host_id", lambda: "another")
        assert await put(it, KEYS[:4]) == Stored(4, 4)
        monkeypatch.undo()
        assert await put(it) == Stored(1, 0), "as the wire has it: it is not tried again"
        assert len(store.pool.match(IDS)) == 4
        clock = it._link.clock = LaterClock()
        assert await put(it) == Stored(1, 0), "not yet"
        clock.later_s = 61.0
        assert await put(it) == Stored(9, 5), "it may have been too busy"


async def test_a_block_that_changed_on_its_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = outbox._copied

    def damaging(memory: memoryview, block_bytes: int, cells: Sequence[KVBytes]) -> list[int]:
        digests = real(memory, block_bytes, cells)
        memory[2 * block_bytes + 5] ^= 1
        return digests

    async with served() as (store, address), client(address) as it:
        monkeypatch.setattr(outbox, "_copied", damaging)
        assert await put(it) == Stored(2, 2), "up to the damaged one"
        monkeypatch.setattr(outbox, "_copied", lambda *given: [digest ^ 1 for digest in real(*given)])
        with pytest.raises(DataLoss):
            await put(it, KEYS[2:], depth=2)
        assert len(store.pool.match(IDS)) == 2
        assert store.pool.dram.reserved_bytes == 0


def take(change: Callable[[kvstore_pb2.TakeRequest], object]) -> kvstore_pb2.TakeRequest:
    blocks = [kvstore_pb2.OfferedBlock(key=one, offset=n * LAYOUT.block_bytes) for n, one in enumerate(KEYS[:2])]
    request = kvstore_pb2.TakeRequest(layout=layout_message(LAYOUT), blocks=blocks)
    change(request)
    return request


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda request: request.ClearField("blocks"), InvalidRequest),
        (lambda request: request.ClearField("layout"), InvalidRequest),
        (lambda request: setattr(request, "parent", b"short"), InvalidRequest),
        (lambda request: setattr(request, "parent", KEYS[1]), InvalidRequest),
        (lambda request: setattr(request.blocks[1], "key", KEYS[0]), InvalidRequest),
        (lambda request: setattr(request, "recompute_s", -1), InvalidRequest),
        (lambda request: setattr(request, "recompute_s", float("nan")), InvalidRequest),
        (lambda request: setattr(request.blocks[1], "offset", 1 << 40), InvalidRequest),
        (lambda request: setattr(request, "segment", "here/nothing"), Incompatible),
        (lambda request: None, DataLoss),
    ],
)
async def test_what_cannot_be_taken_is_refused(
    change: Callable[[kvstore_pb2.TakeRequest], object], error: type[HalfmoonError]
) -> None:
    async with served() as (store, address), client(address) as it, Peer(address) as peer:
        await put(it, KEYS[8:])  # makes the writer's memory
        segment = it._outbox._segment
        assert segment is not None
        request = take(change)
        request.segment = request.segment or f"{host_id()}/{segment.name}"
        stub = kvstore_pb2_grpc.KVStoreStub(peer.channel)
        with pytest.raises(error) as caught:
            await peer.call(stub.Take, request, deadline_s=LIMIT_S)
        assert type(caught.value) is error
        assert store.pool.dram.reserved_bytes == 0


@either_way
async def test_a_run_is_charged_to_its_tenant_and_ends_at_its_quota(settings: LinkSettings) -> None:
    owner = KVOwner("acme", 4 * LAYOUT.block_bytes)
    async with served() as (store, address), client(address, settings=settings) as it:
        cells = [content(one) for one in KEYS]
        stored = await it.put_run(KEYS, LAYOUT, cells, Chain(owner=owner), deadline_s=LIMIT_S)
        assert stored.num_held == stored.num_new >= 2
        if stored.num_held < 4:  # a stream that was refused was repeated with half of it
            more = Chain(KEYS[stored.num_held - 1], stored.num_held, owner=owner)
            rest = slice(stored.num_held, 4)
            await it.put_run(KEYS[rest], LAYOUT, cells[rest], more, deadline_s=LIMIT_S)
        with pytest.raises(NoCapacity, match="quota"):
            await it.put_run(KEYS[4:], LAYOUT, cells[4:], Chain(KEYS[3], 4, owner=owner), deadline_s=LIMIT_S)
        stats = await it.stats(deadline_s=LIMIT_S)
        [account] = stats.tenants
        assert (account.tenant, account.num_blocks, account.quota_bytes) == ("acme", 4, owner.quota_bytes)
        assert len(store.pool.match(IDS)) == 4


@either_way
async def test_bytes_that_are_here_are_not_replaced(settings: LinkSettings) -> None:
    async with served() as (store, address), client(address, settings=settings) as it:
        await put(it, KEYS[:3])
        forged = [bytes(LAYOUT.block_bytes)] * 3
        stored = await it.put_run(KEYS[:3], LAYOUT, forged, Chain(owner=KVOwner("mallory")), deadline_s=LIMIT_S)
        assert stored.num_new == 0
        got = [bytes(cells) async for cells in it.get_run(KEYS[:3], LAYOUT, deadline_s=LIMIT_S)]
        assert got == [content(one) for one in KEYS[:3]]
        assert {entry.meta.tenant for entry in store.pool.catalog} == {""}
