"""A worker's prefix cache, read by other workers as a store is: only what is theirs, as much as it can bear."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.errors import Forbidden, HalfmoonError, Incompatible, NoCapacity, NotFound, Unauthenticated
from halfmoon.kv.codec import Codec, encode
from halfmoon.kv.frame import Frame, FrameKind, encode_frame
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.kv.negotiation import encode_open
from halfmoon.pb import kvstore_pb2
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.credential import credential_from
from halfmoon.rpc.credentials.roles import may_call
from halfmoon.rpc.server import running_server
from halfmoon.rpc.store import block_streams
from halfmoon.rpc.store.block_streams import whole_blocks
from halfmoon.rpc.store.chain import Chain
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.worker.servicers.cache_servicer import CacheServicer
from tests.worker.conftest import RunningWorker
from tests.worker.store.test_store_writer import keys_of, single
from tests.worker.test_handover import prefilled, until

Start = Callable[..., Awaitable[RunningWorker]]
PROMPT = [(7 * i + 3) % 125 + 3 for i in range(83)]  # 10 blocks of 8
LIMIT_S = 20.0


@asynccontextmanager
async def reader(worker: RunningWorker) -> AsyncIterator[KVStoreClient]:
    async with aclosing(_Closing(KVStoreClient(worker.peer.address, server_role="worker"))) as closing:
        yield closing.client


class _Closing:
    def __init__(self, client: KVStoreClient) -> None:
        self.client = client

    async def aclose(self) -> None:
        await self.client.close()


class _Limited:
    def time_remaining(self) -> float:
        return LIMIT_S


async def holder(start_worker: Start, tiny: Checkpoint, **options: object) -> RunningWorker:
    """A worker that has the prompt in its prefix cache."""
    worker = await start_worker("prefill", **options)
    await prefilled(worker, single(tiny, PROMPT, "before"))
    return worker


def reads(worker: RunningWorker, outcome: str) -> float:
    return float(worker.metrics.registry.get_sample_value("halfmoon_cache_reads_total", {"outcome": outcome}) or 0)


async def content(worker: RunningWorker, key: bytes) -> bytes:
    async with worker.async_engine.cached([key]) as (block,):
        return bytes(await worker.async_engine.read_block(block))


async def got(client: KVStoreClient, worker: RunningWorker, keys: list[bytes]) -> list[bytes]:
    async with aclosing(client.get_run(keys, worker.engine.layout, deadline_s=LIMIT_S)) as blocks:
        return [bytes(cells) async for cells in blocks]


async def test_what_is_cached_is_found_and_read(start_worker: Start, tiny: Checkpoint) -> None:
    worker = await holder(start_worker, tiny, num_blocks=256)
    keys = keys_of(worker, PROMPT)
    async with reader(worker) as client:
        assert await client.match([*keys, b"x" * 16], deadline_s=LIMIT_S) == ["dram"] * 10
        blocks = await got(client, worker, keys[::-1])
        assert blocks == [await content(worker, key) for key in keys[::-1]]
        whole, layout = await content(worker, keys[3]), worker.engine.layout
        part = await client.get(keys[3], layout, deadline_s=LIMIT_S)
        assert bytes(part) == whole
    await until(lambda: worker.num_used_blocks == 0)
    assert (reads(worker, "served"), reads(worker, "missing")) == (2, 0)


async def test_nobody_reads_what_is_not_theirs(start_worker: Start, tiny: Checkpoint) -> None:
    worker = await start_worker("prefill")
    await prefilled(worker, single(tiny, PROMPT, "before", tenant_salt=b"one"))
    async with reader(worker) as client:
        for salt, num_found in ((b"", 0), (b"two", 0), (b"one", 10)):
            keys = keys_of(worker, PROMPT, salt)
            assert len(await client.of_tenant(salt).match(keys, deadline_s=LIMIT_S)) == num_found
            if not num_found:
                with pytest.raises(NotFound):
                    await got(client.of_tenant(salt), worker, keys)
        other = replace(worker.engine.layout, dtype="bfloat16")
        with pytest.raises(Incompatible):
            await client.get(keys[0], other, deadline_s=LIMIT_S)
        with pytest.raises(NotFound):
            await got(client, worker, [b"x" * 16])
    assert reads(worker, "missing") == 3


async def test_it_is_read_only(start_worker: Start, tiny: Checkpoint) -> None:
    worker = await holder(start_worker, tiny)
    keys, layout = keys_of(worker, PROMPT), worker.engine.layout
    async with reader(worker) as client:
        with pytest.raises(Incompatible):
            await client.prefetch(keys, deadline_s=LIMIT_S)
        with pytest.raises(Incompatible):
            await client.put(b"k" * 16, layout, bytes(layout.block_bytes), Chain(), deadline_s=LIMIT_S)
        with pytest.raises(Incompatible):
            async with client.borrow(keys, deadline_s=LIMIT_S):
                pass


async def test_what_is_read_is_not_evicted_and_what_is_evicted_is_a_miss(start_worker: Start, tiny: Checkpoint) -> None:
    worker = await holder(start_worker, tiny, num_blocks=24)  # readers hold three at a time, each two
    keys, layout = keys_of(worker, PROMPT), worker.engine.layout
    expected = [await content(worker, key) for key in keys[:2]]
    async with reader(worker) as client:
        async with aclosing(client.get_run(keys[:2], layout, deadline_s=LIMIT_S)) as blocks:
            first = bytes(await anext(blocks))
            other = [(11 * i + 5) % 125 + 3 for i in range(170)]
            await prefilled(worker, single(tiny, other, "other"))  # needs 22 of 24 blocks
            assert [first, bytes(await anext(blocks))] == expected
        with pytest.raises(NotFound):
            await got(client, worker, [keys[9]])
        assert len(await client.match(keys, deadline_s=LIMIT_S)) < 10


async def test_readers_beyond_what_it_can_bear_are_refused(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await holder(start_worker, tiny, num_blocks=32)  # four may be held
    keys, may_read, num_copies, most_copies = keys_of(worker, PROMPT), asyncio.Event(), 0, 0
    real = worker.async_engine.read_block

    async def slow(block: int, layers: range | None = None) -> memoryview:
        nonlocal num_copies, most_copies
        num_copies += 1
        most_copies = max(most_copies, num_copies)
        await may_read.wait()
        num_copies -= 1
        return await real(block)

    monkeypatch.setattr(worker.async_engine, "read_block", slow)
    async with reader(worker) as client:
        calls = [asyncio.create_task(got(client, worker, [key])) for key in keys]
        await until(lambda: sum(call.done() for call in calls) == 6)
        (own,) = await prefilled(worker, single(tiny, PROMPT[:20], "own"))  # while they wait
        assert own.first_token.num_cached_tokens == 19
        may_read.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [result for result in results if isinstance(result, HalfmoonError)]
        assert len(refused) == 6
        assert all(isinstance(error, NoCapacity) for error in refused)
        assert most_copies == 1
        assert reads(worker, "busy") == 6
        assert len(await got(client, worker, keys)) == 2, "a run is cut to half of what may be held"
    await until(lambda: worker.num_used_blocks == 0)


async def test_a_reader_that_leaves_gives_its_blocks_back(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await holder(start_worker, tiny, num_blocks=64)

    async def never(block: int, layers: range | None = None) -> memoryview:
        await asyncio.Event().wait()
        raise AssertionError

    async with reader(worker) as client:
        with monkeypatch.context() as patched:
            patched.setattr(worker.async_engine, "read_block", never)
            call = asyncio.create_task(got(client, worker, keys_of(worker, PROMPT)[:4]))
            await until(lambda: worker.num_used_blocks == 4)
            call.cancel()
            await until(lambda: worker.num_used_blocks == 0)
        assert len(await got(client, worker, keys_of(worker, PROMPT)[:4])) == 4


async def test_blocks_are_given_back_as_the_stream_is_closed_and_not_when_it_is_collected(
    start_worker: Start, tiny: Checkpoint
) -> None:
    worker = await holder(start_worker, tiny)
    layout, held = worker.engine.layout, 0

    class Engine:
        @asynccontextmanager
        async def cached(self, keys: Sequence[bytes]) -> AsyncIterator[list[int]]:
            nonlocal held
            held = len(keys)
            try:
                yield list(range(held))
            finally:
                held = 0

        async def read_block(self, block: int, layers: range | None = None) -> memoryview:
            return memoryview(bytes(layout.block_bytes))

        async def kv_read(self, request_id: str, part: KVSlice) -> memoryview:
            raise AssertionError("cached blocks are not read as a prompt's")

    async def opening() -> AsyncIterator[bytes]:
        body = kvstore_pb2.BlocksOpen(keys=[b"k" * 16] * 2).SerializeToString()
        frame = Frame(FrameKind.OPEN, bytes(16), layout.fingerprint(), 0, whole_blocks(layout, 0, 1))
        yield encode_frame(replace(frame, payload=encode_open((), body)))

    servicer = CacheServicer(Engine(), 64, worker.state, worker.metrics)
    stream = servicer.get(opening(), cast(grpc.aio.ServicerContext, _Limited()))
    await anext(stream)
    assert held == 2
    await cast(AsyncGenerator[bytes, None], stream).aclose()
    assert held == 0


@pytest.mark.parametrize("deadline_s", [None, 3600.0])
async def test_nobody_holds_blocks_for_long(start_worker: Start, tiny: Checkpoint, deadline_s: float | None) -> None:
    """One reader that did not read on held all that readers may have, and others were refused meanwhile."""
    worker = await holder(start_worker, tiny)
    layout, body = worker.engine.layout, kvstore_pb2.BlocksOpen(keys=keys_of(worker, PROMPT)).SerializeToString()
    frame = Frame(FrameKind.OPEN, bytes(16), layout.fingerprint(), 0, whole_blocks(layout, 0, 1))
    call = worker.peer.channel.stream_stream("/halfmoon.KVStoreBytes/Get")(timeout=deadline_s)
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it may have been refused already
        await call.write(encode_frame(replace(frame, payload=encode_open((), body))))
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert worker.num_used_blocks == 0


async def test_callers_need_the_credential_of_a_worker(start_worker: Start, tiny: Checkpoint) -> None:
    worker = await holder(start_worker, tiny)
    keys, layout = keys_of(worker, PROMPT), worker.engine.layout
    cache = CacheServicer(worker.async_engine, 32, worker.state, worker.metrics)
    access, metrics = CallAccess(credential_from("s" * 40, "worker")), RpcMetrics(CollectorRegistry())
    async with running_server("127.0.0.1:0", cache.registrations(), metrics, grace_s=0, access=access) as server:
        for credential, error in (
            (credential_from("s" * 40, "worker"), None),
            (credential_from("s" * 40, "gateway"), Forbidden),
            (credential_from("t" * 40, "worker"), Unauthenticated),
        ):
            client = KVStoreClient(f"127.0.0.1:{server.port}", credential=credential, server_role="worker")
            try:
                if error is None:
                    assert len(await client.match(keys, deadline_s=LIMIT_S)) == 10
                    assert bytes(await client.get(keys[0], layout, deadline_s=LIMIT_S)) == await content(
                        worker, keys[0]
                    )
                    continue
                with pytest.raises(error):
                    await client.match(keys, deadline_s=LIMIT_S)
                with pytest.raises(error):
                    await client.get(keys[0], layout, deadline_s=LIMIT_S)
            finally:
                await client.close()


def test_workers_alone_may_read() -> None:
    for method in ("/halfmoon.KVStore/Match", "/halfmoon.KVStoreBytes/Get"):
        assert may_call("worker", method)
        assert not any(may_call(role, method) for role in ("gateway", "operator", "planner", "profiler"))


async def test_layers_of_all_blocks_come_before_the_next_layers_of_any(start_worker: Start, tiny: Checkpoint) -> None:
    worker = await holder(start_worker, tiny, num_blocks=64)
    keys, layout = keys_of(worker, PROMPT)[:3], worker.engine.layout
    whole = [await content(worker, key) for key in keys]
    layer_bytes = layout.block_bytes // layout.num_layers
    async with reader(worker) as client:
        parts = await got_layers(client, worker, keys)
        assert parts == [
            (range(n, n + 1), [block[n * layer_bytes : (n + 1) * layer_bytes] for block in whole]) for n in range(2)
        ]


async def test_a_get_by_layer_says_how_many_blocks_come(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what readers may hold, half of what another one leaves, and none behind one that was evicted."""
    worker = await holder(start_worker, tiny, num_blocks=64)
    keys, layout = keys_of(worker, PROMPT), worker.engine.layout
    async with reader(worker) as client:
        assert (await client.look_up(keys, deadline_s=LIMIT_S)).most_by_layer == 4
        assert [len(blocks) for _, blocks in await got_layers(client, worker, keys)] == [4, 4]
        may_go_on, real = asyncio.Event(), worker.async_engine.read_block

        async def read_block(block: int, layers: range | None = None) -> memoryview:
            if block in held and layers == range(1, 2):
                await may_go_on.wait()
            return await real(block, layers)

        async with worker.async_engine.cached(keys[:1]) as held:
            monkeypatch.setattr(worker.async_engine, "read_block", read_block)
        async with aclosing(client.get_layers(keys[:4], layout, 1, deadline_s=LIMIT_S)) as first:
            await anext(first)
            assert (await client.look_up(keys, deadline_s=LIMIT_S)).most_by_layer == 2
            second = asyncio.ensure_future(got_layers(client, worker, keys[4:]))
            await until(lambda: worker.num_used_blocks == 6)
            may_go_on.set()
            assert [len(blocks) for _, blocks in await second] == [2, 2]
        await until(lambda: worker.num_used_blocks == 0)
        evicted = [keys[0], b"x" * 16, keys[1]]
        assert [len(blocks) for _, blocks in await got_layers(client, worker, evicted)] == [1, 1]
        with pytest.raises(NotFound):
            await got_layers(client, worker, evicted[1:])


async def test_raw_blocks_are_read_while_others_are_encoded(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await holder(start_worker, tiny, num_blocks=64)
    keys, layout, may_end, real = keys_of(worker, PROMPT)[:1], worker.engine.layout, threading.Event(), encode

    def slow(*arguments: Any) -> memoryview:
        may_end.wait()
        return real(*arguments)

    monkeypatch.setattr(block_streams, "encode", slow)
    async with (
        reader(worker) as client,
        reader(worker) as other,
        aclosing(client.get_run(keys, layout, codec=Codec.ZSTD, deadline_s=LIMIT_S)) as coded,
    ):
        call = asyncio.ensure_future(anext(coded))
        try:
            await until(lambda: worker.num_used_blocks == 1)
            assert await got(other, worker, keys) == [await content(worker, keys[0])]
            assert not call.done()
        finally:
            may_end.set()
        assert bytes(await call) == await content(worker, keys[0])


async def got_layers(
    client: KVStoreClient, worker: RunningWorker, keys: list[bytes]
) -> list[tuple[range, list[bytes]]]:
    async with aclosing(client.get_layers(keys, worker.engine.layout, 1, deadline_s=LIMIT_S)) as parts:
        return [(layers, [bytes(cells) for cells in blocks]) async for layers, blocks in parts]
