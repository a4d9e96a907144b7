"""The client against a real store: blocks in and out over every path, loans, tenants, events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from halfmoon.errors import (
    DataLoss,
    DeadlineExceeded,
    Incompatible,
    InvalidRequest,
    NoCapacity,
    NotFound,
    Unavailable,
)
from halfmoon.kv.codec import Codec
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb import kvstore_pb2
from halfmoon.rpc.server import running_server
from halfmoon.rpc.store import block_streams
from halfmoon.rpc.store.chain import Chain
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.transport.link import LinkSettings
from services.kvstore.assembly import Store, running_store
from services.kvstore.settings import KVStoreSettings
from tests.services.kvstore.blocks import LAYOUT, content, key

BIG = KVLayout(3, 4, 64, "float16", 1024)  # more than one frame
KEYS = [key(n) for n in range(16)]
LIMIT_S = 20.0


@asynccontextmanager
async def served(directory: Path | None = None, **changes: Any) -> AsyncIterator[tuple[Store, str]]:
    from prometheus_client import CollectorRegistry

    settings = KVStoreSettings(**{"dram_bytes": 16 << 20, "disk_dir": directory, **changes})
    async with (
        running_store(settings) as store,
        running_server("127.0.0.1:0", store.registrations, RpcMetrics(CollectorRegistry()), grace_s=0) as server,
    ):
        yield store, f"127.0.0.1:{server.port}"


@asynccontextmanager
async def client(address: str, salt: bytes = b"", settings: LinkSettings | None = None) -> AsyncIterator[KVStoreClient]:
    made = KVStoreClient(address, salt, settings)
    try:
        yield made
    finally:
        await made.close()


async def put_chain(it: KVStoreClient, num: int) -> None:
    for depth in range(num):
        chain = Chain(KEYS[depth - 1] if depth else b"", depth, recompute_s=0.01)
        await it.put(KEYS[depth], LAYOUT, content(KEYS[depth]), chain, deadline_s=LIMIT_S)


@pytest.mark.parametrize("transports", [("shm",), ()])
async def test_a_block_comes_back_as_it_went(transports: tuple[str, ...]) -> None:
    async with served() as (store, address), client(address, settings=LinkSettings(transports)) as it:
        for layout in (LAYOUT, BIG):
            block = KEYS[layout is BIG]
            await it.put(block, layout, content(block, layout), deadline_s=LIMIT_S)
            assert bytes(await it.get(block, layout, deadline_s=LIMIT_S)) == content(block, layout)
        part = KVRange(1, 2, 0, 1, 100, 512)
        assert len(await it.get(KEYS[1], BIG, part, deadline_s=LIMIT_S)) == part.num_bytes(BIG)
        assert (await it.stats(deadline_s=LIMIT_S)).num_hits_total == 3
        store.pool.dram.check_integrity()


async def test_a_short_get_says_how_fast_its_blocks_came() -> None:
    """And an empty one leaves what another one learns at the same time."""
    async with served() as (_, address), client(address) as it:
        await it.put(KEYS[0], BIG, content(KEYS[0], BIG), deadline_s=LIMIT_S)
        async with aclosing(it.get_run(KEYS[:2], BIG, deadline_s=LIMIT_S)) as blocks:
            await anext(blocks)
            with pytest.raises(NotFound):
                await it.get(KEYS[3], BIG, deadline_s=LIMIT_S)
            with pytest.raises(StopAsyncIteration):
                await anext(blocks)
        assert it.inbound.estimators[Codec.RAW].estimate is not None


async def test_a_store_sends_no_layers_apart() -> None:
    async with served() as (_, address), client(address) as it:
        await it.put(KEYS[0], BIG, content(KEYS[0], BIG), deadline_s=LIMIT_S)
        assert (await it.look_up(KEYS[:1], deadline_s=LIMIT_S)).most_by_layer == 0
        with pytest.raises(InvalidRequest, match="all its layers"):
            await anext(it.get_layers(KEYS[:1], BIG, 1, deadline_s=LIMIT_S))


def values(seed: int) -> bytes:
    """A block of BIG, whose exponents resemble each other as those of real KV do."""
    drawn = np.random.default_rng(seed).uniform(1, 2, BIG.block_bytes // BIG.item_bytes)
    return drawn.astype(np.float16).tobytes()


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("kept", ["raw", "zstd"])
async def test_blocks_travel_compressed_and_come_exactly(codec: Codec, kept: str) -> None:
    async with served(dram_codec=kept) as (_, address), client(address) as it:
        for seed, block in enumerate(KEYS[:2]):
            await it.put(block, BIG, values(seed), deadline_s=LIMIT_S)
        run = it.get_run(KEYS[:2], BIG, codec=codec, deadline_s=LIMIT_S)
        async with aclosing(run) as parts:
            came = b"".join([bytes(part) async for part in parts])
        assert came == values(0) + values(1)
        ((asked, sizes),) = it.inbound.take_sizes().items()
        assert (asked, sizes.raw_bytes) == (codec, len(came))
        assert sizes.encoded_bytes < 0.95 * len(came)
        assert it.inbound.take_sizes() == {}, "each Get counts once"
        assert it.inbound.estimators[codec].estimate is not None
        assert it.inbound.estimators[Codec.RAW].estimate is None, "other codecs say nothing of raw KV"


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
async def test_a_block_goes_as_it_is_kept_where_it_fits_a_frame(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, part = replace(BIG, num_layers=1), KVRange(0, 1, 1, 3, 0, 7)
    block = values(0)[: layout.block_bytes]
    async with served(dram_codec=codec.name.lower()) as (_, address), client(address) as it:
        for key in KEYS[:2]:
            await it.put(key, layout, block, deadline_s=LIMIT_S)
        with monkeypatch.context() as patched:
            patched.setattr(EntryCodec, "decode", not_called)
            patched.setattr(block_streams, "encode", not_called)
            async with aclosing(it.get_run(KEYS[:2], layout, codec=codec, deadline_s=LIMIT_S)) as blocks:
                assert [bytes(cells) async for cells in blocks] == [block] * 2
        async with aclosing(it.get_run(KEYS[:1], layout, part, codec, deadline_s=LIMIT_S)) as blocks:
            cells = np.frombuffer(block, np.float16).reshape(layout.shape(1, layout.block_tokens))
            assert bytes(await anext(blocks)) == cells[:, :, 1:3, :7].tobytes()


def not_called(*arguments: object) -> NoReturn:
    raise AssertionError("the block was decoded, or encoded again")


async def test_what_does_not_compress_or_cannot_be_travels_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).bytes(BIG.block_bytes)
    async with served() as (_, address), client(address) as it:
        await it.put(KEYS[0], BIG, noise, deadline_s=LIMIT_S)
        async with aclosing(it.get_run(KEYS[:1], BIG, codec=Codec.LZ4, deadline_s=LIMIT_S)) as blocks:
            assert [bytes(block) async for block in blocks] == [noise]
        assert it.inbound.take_sizes() == {Codec.LZ4: (len(noise), len(noise))}
        await it.put(KEYS[1], BIG, values(1), deadline_s=LIMIT_S)
        monkeypatch.setattr(block_streams, "decodable", lambda: frozenset({Codec.RAW}))  # as without the packages
        async with aclosing(it.get_run(KEYS[1:2], BIG, codec=Codec.ZSTD, deadline_s=LIMIT_S)) as blocks:
            assert [bytes(block) async for block in blocks] == [values(1)]
        assert it.inbound.take_sizes() == {Codec.ZSTD: (len(noise), len(noise))}


async def test_a_lossy_codec_is_not_asked_of_a_store() -> None:
    async with served() as (_, address), client(address) as it:
        await it.put(KEYS[0], BIG, values(0), deadline_s=LIMIT_S)
        async with aclosing(it.get_run(KEYS[:1], BIG, codec=Codec.INT8, deadline_s=LIMIT_S)) as blocks:
            assert [bytes(block) async for block in blocks] == [values(0)]


async def test_a_chain_is_matched_prefetched_and_dropped(tmp_path: Path) -> None:
    async with served(tmp_path) as (store, address), client(address) as it:
        await put_chain(it, 4)
        await store.pool.settled()
        entry = store.pool.catalog.get(block_id(KEYS[3]))
        assert entry is not None
        assert (entry.meta.depth, entry.meta.parent, entry.meta.recompute_s) == (3, block_id(KEYS[2]), 0.01)
        for depth in (3, 2):
            store.pool.catalog.lose(block_id(KEYS[depth]), Tier.DRAM)
        assert await it.match(KEYS[:5], deadline_s=LIMIT_S) == ["dram", "dram", "disk", "disk"]
        assert await it.prefetch(KEYS[:5], deadline_s=LIMIT_S) == 4
        assert await store.pool.drop([block_id(KEYS[1])]) == 3
        assert await it.match(KEYS[:5], deadline_s=LIMIT_S) == ["dram"]
        with pytest.raises(NotFound):
            await it.get(KEYS[1], LAYOUT, deadline_s=LIMIT_S)


async def test_a_chain_goes_on_in_this_store_whose_beginning_is_elsewhere() -> None:
    async with served() as (store, address), client(address) as it:
        await it.put(KEYS[0], LAYOUT, content(KEYS[0]), Chain(), deadline_s=LIMIT_S)
        await it.put(KEYS[3], LAYOUT, content(KEYS[3]), Chain(KEYS[2], 3), deadline_s=LIMIT_S)
        assert await it.match(KEYS[:5], deadline_s=LIMIT_S) == ["dram"]
        assert await it.find(KEYS[:5], deadline_s=LIMIT_S) == {0: "dram", 3: "dram"}
        assert await it.find(KEYS[4:], deadline_s=LIMIT_S) == {}
        assert bytes(await it.get(KEYS[3], LAYOUT, deadline_s=LIMIT_S)) == content(KEYS[3])
        store.pool.catalog.check_integrity()


async def test_a_store_says_what_would_make_room() -> None:
    async with served(dram_bytes=8 * LAYOUT.block_bytes) as (store, address), client(address) as it:
        assert (await it.look_up(KEYS[:1], with_room=True, deadline_s=LIMIT_S)).room_idle_s == math.inf
        num = 0
        while store.pool.room_idle_s() == math.inf:
            key = num.to_bytes(16, "big")
            await it.put(key, LAYOUT, content(key), Chain(), deadline_s=LIMIT_S)
            num += 1
        assert 0 <= (await it.look_up(KEYS[:1], with_room=True, deadline_s=LIMIT_S)).room_idle_s < math.inf
        assert (await it.look_up(KEYS[:1], deadline_s=LIMIT_S)).room_idle_s == 0


@pytest.mark.parametrize("codec", ["raw", "zstd"])
async def test_lent_blocks_are_read_where_they_lie(tmp_path: Path, codec: str) -> None:
    async with served(tmp_path, dram_codec=codec) as (store, address), client(address) as it:
        await put_chain(it, 3)
        await store.pool.settled()
        store.pool.catalog.lose(block_id(KEYS[2]), Tier.DRAM)
        for _ in range(2):  # the second time the mapping is there
            async with it.borrow(KEYS[:5], deadline_s=LIMIT_S) as blocks:
                assert [bytes(block.cells()) for block in blocks] == [content(one) for one in KEYS[:3]]
                assert blocks[0].stored.readonly
                first = store.pool.dram.acquire(block_id(KEYS[0]))
                assert blocks[0].stored == first.room.view
                store.pool.dram.release(first)
        store.pool.dram.check_integrity()


async def test_lent_blocks_stay_while_others_come_and_go() -> None:
    async with served(dram_bytes=8 * LAYOUT.block_bytes) as (store, address), client(address) as it:
        await put_chain(it, 2)
        async with it.borrow(KEYS[:2], deadline_s=LIMIT_S) as blocks:
            for n in range(2, 14):
                await it.put(KEYS[n], LAYOUT, content(KEYS[n]), deadline_s=LIMIT_S)
            assert await store.pool.drop([block_id(KEYS[0])]) == 2, "it need not stay visible"
            for n in range(2, 14):
                await it.put(KEYS[n], LAYOUT, content(KEYS[n]), deadline_s=LIMIT_S)
            assert [bytes(block.cells()) for block in blocks] == [content(one) for one in KEYS[:2]]
        await it.put(KEYS[15], LAYOUT, content(KEYS[15]), deadline_s=LIMIT_S)
        store.pool.dram.check_integrity()


async def test_a_reader_that_dies_gives_its_loan_back() -> None:
    async with served(dram_bytes=2 * LAYOUT.block_bytes, lease_s=3600.0) as (_, address):
        async with client(address) as it:
            await put_chain(it, 2)
            with pytest.raises(RuntimeError):
                await die_as_a_borrower(it)
        async with client(address) as it:
            await put_when_there_is_room(it, KEYS[5])


async def die_as_a_borrower(it: KVStoreClient) -> None:
    async with it.borrow(KEYS[:2], deadline_s=LIMIT_S):
        with pytest.raises(NoCapacity):
            await it.put(KEYS[5], LAYOUT, content(KEYS[5]), deadline_s=LIMIT_S)
        raise RuntimeError("the reader died")


async def put_when_there_is_room(it: KVStoreClient, block: bytes) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await it.put(block, LAYOUT, content(block), deadline_s=LIMIT_S)
                return
            except NoCapacity:
                continue


async def test_a_loan_that_lasts_too_long_counts_for_nothing() -> None:
    async with served(dram_bytes=2 * LAYOUT.block_bytes, lease_s=0.05) as (_, address), client(address) as it:
        await put_chain(it, 2)
        with pytest.raises(DeadlineExceeded):
            await overstay(it)


async def overstay(it: KVStoreClient) -> None:
    async with it.borrow(KEYS[:2], deadline_s=LIMIT_S) as blocks:
        for block in KEYS[5:7]:
            await put_when_there_is_room(it, block)
        for lent in blocks:
            with pytest.raises(DataLoss):
                lent.cells()


async def test_a_store_that_goes_ends_the_loan() -> None:
    async with served() as (_, address):
        it = KVStoreClient(address)
        await put_chain(it, 1)
        loan = it.borrow(KEYS[:1], deadline_s=LIMIT_S)
        [block] = await loan.__aenter__()
    assert bytes(block.cells()) == content(KEYS[0]), "the mapping outlives the store"
    with pytest.raises(Unavailable):
        await loan.__aexit__(None, None, None)
    with pytest.raises(Unavailable):
        async with it.borrow(KEYS[:1], deadline_s=LIMIT_S):
            pass
    await it.close()


async def test_a_store_elsewhere_lends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (_, address), client(address) as it:
        await put_chain(it, 1)
        monkeypatch.setattr("halfmoon.rpc.transport.mapped.host_id", lambda: "another")
        with pytest.raises(Incompatible):
            async with it.borrow(KEYS[:1], deadline_s=LIMIT_S):
                pass


async def test_tenants_do_not_see_each_other() -> None:
    async with served() as (_, address), client(address, b"one") as one, client(address, b"two") as two:
        await put_chain(one, 2)
        assert await two.match(KEYS[:2], deadline_s=LIMIT_S) == []
        assert await two.prefetch(KEYS[:2], deadline_s=LIMIT_S) == 0
        with pytest.raises(NotFound):
            await two.get(KEYS[0], LAYOUT, deadline_s=LIMIT_S)
        async with two.borrow(KEYS[:2], deadline_s=LIMIT_S) as blocks:
            assert blocks == []
        await two.put(KEYS[0], LAYOUT, content(KEYS[7]), deadline_s=LIMIT_S)
        assert bytes(await one.get(KEYS[0], LAYOUT, deadline_s=LIMIT_S)) == content(KEYS[0])
        assert await one.match(KEYS[:2], deadline_s=LIMIT_S) == ["dram", "dram"]


async def test_a_watcher_knows_what_is_held() -> None:
    async with served() as (store, address), client(address) as it:
        await put_chain(it, 2)
        async with it.watch() as responses:
            snapshot = await anext(responses)
            assert (snapshot.is_snapshot, snapshot.is_last_part, snapshot.sequence) == (True, True, 2)
            assert [block.key for block in snapshot.blocks] == KEYS[:2]
            await it.put(KEYS[2], LAYOUT, content(KEYS[2]), Chain(KEYS[1], 2), deadline_s=LIMIT_S)
            stored = await anext(responses)
            assert [(event.kind, event.block.key) for event in stored.events] == [
                (kvstore_pb2.BlockEvent.STORED, KEYS[2])
            ]
            await store.pool.drop([block_id(KEYS[1])])
            gone = await anext(responses)
            assert [(event.kind, event.block.key) for event in gone.events] == [
                (kvstore_pb2.BlockEvent.EVICTED, KEYS[2]),
                (kvstore_pb2.BlockEvent.EVICTED, KEYS[1]),
            ]
            assert gone.sequence == 5
