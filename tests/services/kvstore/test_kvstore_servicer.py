"""The store over a real loopback channel: blocks in and out, and what dies on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import numpy as np
import pytest
from prometheus_client import generate_latest

from halfmoon.catalog.block_identity import block_id
from halfmoon.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    HalfmoonError,
    Incompatible,
    InvalidRequest,
    NoCapacity,
    NotFound,
    Unavailable,
)
from halfmoon.kv.codec import Codec, encode
from halfmoon.kv.frame import MAX_PAYLOAD_BYTES, Frame, FrameKind, KVRange, decode_frame, encode_frame, plan_frames
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.negotiation import encode_open
from halfmoon.kv.receiver import Coverage
from halfmoon.pb import kvstore_pb2, kvstore_pb2_grpc, types_pb2
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.status import error_from
from halfmoon.rpc.transfer import KVIntake, TransferSender, transfer_to
from services.kvstore.bytes_servicer import KVBytesServicer
from services.kvstore.metrics import KVStoreMetrics
from services.kvstore.movement.incoming import Arrivals
from services.kvstore.movement.replication import Replicator
from services.kvstore.movement.shared_memory_get import SharedMemoryGet
from services.kvstore.movement.shared_memory_put import SharedMemoryPut
from services.kvstore.pool import Pool
from services.kvstore.servicer import KVStoreServicer

LAYOUT = KVLayout(2, 2, 4, "float32", 8)
BIG = KVLayout(3, 4, 64, "float16", 1024)  # more than one frame
KEY, OTHER = b"k" * 16, b"o" * 16
PUT, GET = "/halfmoon.KVStoreBytes/Put", "/halfmoon.KVStoreBytes/Get"
ID = b"transfer-id-0123"


class Store:
    """A served store and a channel to it."""

    def __init__(self, pool: Pool, peer: Peer, metrics: KVStoreMetrics) -> None:
        self.pool = pool
        self.peer = peer
        self.metrics = metrics
        self.stub = kvstore_pb2_grpc.KVStoreStub(peer.channel)

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[TransferSender]:
        async with transfer_to(self.peer, LAYOUT, deadline_s=30, method=PUT) as sender:
            yield sender

    async def put(self, content: bytes, layout: KVLayout = LAYOUT, key: bytes = KEY, token_start: int = 0) -> None:
        whole = whole_block(layout, token_start)
        cells = np.frombuffer(content, dtype=np.uint8).reshape(layout.num_layers, 2, layout.num_kv_heads, -1)
        cells = cells.reshape(*cells.shape[:3], layout.block_tokens, -1)
        async with transfer_to(self.peer, layout, deadline_s=30, method=PUT) as sender:
            await sender.open(whole, body(layout, key))
            for part in plan_frames(layout, layout.whole(), token_start, layout.block_tokens):
                first = part.token_start - token_start
                payload = cells[part.layer_start : part.layer_end, :, :, first : first + part.num_tokens]
                await sender.data(part, payload.tobytes())
            await sender.commit(b"")

    async def get(self, layout: KVLayout = LAYOUT, key: bytes = KEY, part: KVRange | None = None) -> list[Frame]:
        wanted = open_frame(part or whole_block(layout), body(None, key), layout.fingerprint())
        return await self.exchange(GET, [encode_frame(wanted)])

    async def exchange(self, method: str, messages: list[bytes]) -> list[Frame]:
        """Sends messages, ends the stream, gives all answers."""
        call = self.peer.raw_stream(method, deadline_s=30)
        try:
            for message in messages:
                await call.write(message)
            await call.done_writing()
            return [decode_frame(answer) async for answer in call]
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure) from failure
        except asyncio.InvalidStateError:  # the server was quicker
            metadata = (await call.initial_metadata(), await call.trailing_metadata())
            raise error_from(grpc.aio.AioRpcError(await call.code(), *metadata, await call.details())) from None
        finally:
            call.cancel()

    async def stats(self) -> kvstore_pb2.StatsResponse:
        response = await self.peer.call(self.stub.Stats, kvstore_pb2.StatsRequest(), deadline_s=10)
        assert isinstance(response, kvstore_pb2.StatsResponse)
        return response

    async def until_nothing_is_reserved(self) -> None:
        async with asyncio.timeout(20):
            while (await self.stats()).reserved_bytes:
                pass


@asynccontextmanager
async def served(budget_bytes: int = 64 << 20, lease_s: float = 30) -> AsyncIterator[Store]:
    pool = Pool(memoryview(bytearray(budget_bytes)))
    metrics, arrivals = KVStoreMetrics(pool), Arrivals(pool)
    control = KVStoreServicer(
        pool, SharedMemoryGet(pool, lease_s, None), SharedMemoryPut(pool, arrivals), Replicator(pool)
    )
    intake = KVIntake()
    services = (
        lambda server: kvstore_pb2_grpc.add_KVStoreServicer_to_server(control, server),
        KVBytesServicer(pool, arrivals, intake, lease_s).registration(),
    )
    async with (
        running_server("127.0.0.1:0", services, metrics.rpc, grace_s=0) as server,
        Peer(f"127.0.0.1:{server.port}") as peer,
    ):
        yield Store(pool, peer, metrics)
        pool.catalog.check_integrity()
        pool.dram.check_integrity()
    intake.close()


def whole_block(layout: KVLayout, token_start: int = 0) -> KVRange:
    return KVRange(0, layout.num_layers, 0, layout.num_kv_heads, token_start, layout.block_tokens)


def body(layout: KVLayout | None, key: bytes = KEY) -> bytes:
    message = kvstore_pb2.BlocksOpen(keys=[key])
    if layout is not None:
        message.layout.CopyFrom(
            types_pb2.KVLayout(
                num_layers=layout.num_layers,
                num_kv_heads=layout.num_kv_heads,
                head_dim=layout.head_dim,
                dtype=layout.dtype,
                block_tokens=layout.block_tokens,
            )
        )
    return message.SerializeToString()


def content(layout: KVLayout, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(layout.block_bytes)


def assembled(frames: list[Frame], layout: KVLayout, wanted: KVRange) -> bytes:
    """The wanted range's bytes, after checking that DATA covered it exactly once, in order, and DONE came last."""
    assert [frame.kind for frame in frames] == [FrameKind.DATA] * (len(frames) - 1) + [FrameKind.DONE]
    assert [frame.sequence for frame in frames] == list(range(len(frames)))
    assert all(frame.transfer_id == ID and frame.layout_fingerprint == layout.fingerprint() for frame in frames)
    coverage = Coverage(wanted)
    out = np.zeros(
        (layout.num_layers, 2, layout.num_kv_heads, wanted.num_tokens, layout.head_dim * layout.item_bytes), np.uint8
    )
    for frame in frames[:-1]:
        r = frame.range
        coverage.add(r)
        first = r.token_start - wanted.token_start
        into = out[r.layer_start : r.layer_end, :, r.head_start : r.head_end, first : first + r.num_tokens]
        into[...] = np.frombuffer(memoryview(frame.payload), np.uint8).reshape(into.shape)
    assert coverage.is_whole()
    return out[wanted.layer_start : wanted.layer_end, :, wanted.head_start : wanted.head_end].tobytes()


@pytest.mark.parametrize("layout", [LAYOUT, BIG])
async def test_a_block_comes_back_as_it_went(layout: KVLayout) -> None:
    async with served() as it:
        await it.put(content(layout), layout, token_start=3 * layout.block_tokens)
        frames = await it.get(layout)
    assert assembled(frames, layout, whole_block(layout)) == content(layout)
    assert (len(frames) > 2) == (layout.block_bytes > MAX_PAYLOAD_BYTES)


async def test_a_reader_may_take_its_shard_at_its_own_position() -> None:
    part = KVRange(1, 2, 0, 1, 40, 8)
    async with served() as it:
        await it.put(content(LAYOUT))
        frames = await it.get(part=part)
    cells = np.frombuffer(content(LAYOUT), np.uint8).reshape(2, 2, 2, 8, 16)
    assert assembled(frames, LAYOUT, part) == cells[1:2, :, 0:1].tobytes()


async def test_control_calls() -> None:
    async with served() as it:
        await it.put(content(LAYOUT))
        match = await it.peer.call(it.stub.Match, kvstore_pb2.MatchRequest(keys=[KEY, OTHER]), deadline_s=10)
        await it.get()
        stats = await it.stats()
        with pytest.raises(InvalidRequest):
            await it.peer.call(it.stub.Match, kvstore_pb2.MatchRequest(keys=[b"short"]), deadline_s=10)
    assert match.num_matched == 1
    assert (stats.num_blocks, stats.budget_bytes) == (1, 64 << 20)
    assert (stats.num_hits_total, stats.num_stored_total, stats.num_misses_total) == (1, 1, 0)


async def test_an_absent_block_is_not_found() -> None:
    async with served() as it:
        with pytest.raises(NotFound):
            await it.get()


async def test_blocks_of_several_layouts_live_together() -> None:
    other = KVLayout(1, 1, 2, "bfloat16", 4)
    async with served() as it:
        await it.put(content(LAYOUT))
        await it.put(content(other), other, OTHER)
        assert assembled(await it.get(other, OTHER), other, whole_block(other)) == content(other)
        with pytest.raises(Incompatible):
            await it.get(other, KEY)
        with pytest.raises(Incompatible):
            await it.put(content(other), other, KEY)


async def test_a_block_over_the_budget_is_refused_before_any_byte() -> None:
    async with served(budget_bytes=LAYOUT.block_bytes) as it:
        huge = KVLayout(60_000, 60_000, 2**31, "float32", 2**31)
        for layout in (BIG, huge):
            async with transfer_to(it.peer, layout, deadline_s=30, method=PUT) as sender:
                with pytest.raises(NoCapacity, match="budget"):
                    await sender.open(whole_block(layout), body(layout))


@pytest.mark.parametrize("after_data", [False, True])
async def test_a_sender_that_dies_leaves_nothing(after_data: bool) -> None:
    async with served() as it:
        async with it.sender() as sender:
            await sender.open(whole_block(LAYOUT), body(LAYOUT))
            assert it.pool.dram.reserved_bytes == LAYOUT.block_bytes
            if after_data:
                await sender.data(whole_block(LAYOUT), content(LAYOUT))
        await it.until_nothing_is_reserved()
        assert it.pool.match([block_id(KEY)]) == []


async def test_a_silent_sender_loses_its_lease() -> None:
    async with served(lease_s=0.05) as it, it.sender() as sender:
        await sender.open(whole_block(LAYOUT), body(LAYOUT))
        with pytest.raises(DeadlineExceeded, match="silent"):
            await sender.until_broken()
        await it.until_nothing_is_reserved()


async def test_an_early_end_of_the_stream_is_not_a_commit() -> None:
    async with served() as it:
        with pytest.raises(Unavailable, match="before its COMMIT"):
            await it.exchange(PUT, [encode_frame(open_frame())])
        await it.until_nothing_is_reserved()


async def test_a_commit_with_a_hole_is_data_loss() -> None:
    async with served() as it:
        async with it.sender() as sender:
            await sender.open(whole_block(LAYOUT), body(LAYOUT))
            half = KVRange(0, 1, 0, 2, 0, 8)
            await sender.data(half, bytes(half.num_bytes(LAYOUT)))
            with pytest.raises(DataLoss, match="never arrived"):
                await sender.commit(b"")
        await it.until_nothing_is_reserved()
        assert it.pool.match([block_id(KEY)]) == []


async def test_a_block_in_another_codec_or_dtype_is_refused() -> None:
    other = replace(LAYOUT, dtype="bfloat16")
    encoded = encode(Codec.INT8, np.zeros(whole_block(LAYOUT).shape(LAYOUT), np.uint32), "float32")
    raw = bytes(whole_block(other).num_bytes(other))
    for layout, payload, codec in ((LAYOUT, encoded, Codec.INT8), (other, raw, Codec.RAW)):
        async with served() as it:
            async with transfer_to(it.peer, layout, deadline_s=30, method=PUT) as sender:
                await sender.open(whole_block(LAYOUT), body(LAYOUT))
                await sender.data(whole_block(LAYOUT), payload, codec)
                with pytest.raises(Incompatible, match="is raw and of its layout's dtype"):
                    await sender.commit(b"")
            await it.until_nothing_is_reserved()


async def test_a_corrupted_block_is_data_loss_once_then_absent() -> None:
    async with served() as it:
        await it.put(content(LAYOUT))
        block = it.pool.dram.acquire(block_id(KEY))
        block.room.view[0] ^= 1
        it.pool.dram.release(block)
        with pytest.raises(DataLoss):
            await it.get()
        with pytest.raises(NotFound):
            await it.get()


def open_frame(
    part: KVRange | None = None, payload: bytes = body(LAYOUT), fingerprint: int = LAYOUT.fingerprint()
) -> Frame:
    return Frame(FrameKind.OPEN, ID, fingerprint, 0, part or whole_block(LAYOUT), payload=encode_open((), payload))


@pytest.mark.parametrize(
    ("method", "frame", "error"),
    [
        (PUT, Frame(FrameKind.COMMIT, ID, LAYOUT.fingerprint(), 0), InvalidRequest),
        (PUT, open_frame(payload=b"\xff"), InvalidRequest),
        (PUT, open_frame(payload=body(None)), InvalidRequest),
        (PUT, open_frame(payload=body(LAYOUT, b"k")), InvalidRequest),
        (PUT, open_frame(KVRange(0, 1, 0, 2, 0, 8)), InvalidRequest),
        (PUT, open_frame(fingerprint=1), Incompatible),
        (GET, Frame(FrameKind.DATA, ID, LAYOUT.fingerprint(), 0), InvalidRequest),
        (GET, open_frame(KVRange(0, 3, 0, 2, 0, 8)), InvalidRequest),
        (GET, open_frame(KVRange(0, 2, 0, 2, 0, 9)), InvalidRequest),
        (GET, open_frame(fingerprint=1), Incompatible),
    ],
)
async def test_bad_first_frames(method: str, frame: Frame, error: type[HalfmoonError]) -> None:
    async with served() as it:
        await it.put(content(LAYOUT))
        with pytest.raises(error) as caught:
            await it.exchange(method, [encode_frame(frame)])
        assert type(caught.value) is error
        await it.until_nothing_is_reserved()


async def test_what_is_not_a_frame_is_incompatible_and_a_broken_one_data_loss() -> None:
    broken = bytearray(encode_frame(open_frame()))
    broken[-1] ^= 1
    async with served() as it:
        with pytest.raises(Incompatible):
            await it.exchange(PUT, [b"hello"])
        with pytest.raises(DataLoss):
            await it.exchange(PUT, [bytes(broken)])


async def test_an_abort_is_answered_as_cancelled() -> None:
    abort = Frame(FrameKind.ABORT, ID, LAYOUT.fingerprint(), 1)
    async with served() as it:
        with pytest.raises(Cancelled):
            await it.exchange(PUT, [encode_frame(open_frame()), encode_frame(abort)])
        await it.until_nothing_is_reserved()


async def test_metrics_show_the_stores_figures() -> None:
    async with served() as it:
        await it.put(content(LAYOUT))
        text = generate_latest(it.metrics.registry).decode()
    assert 'halfmoon_kvstore_blocks{tier="dram"} 1.0' in text
    assert "halfmoon_kvstore_stored_total 1.0" in text
    assert f'halfmoon_kvstore_used_bytes{{tier="dram"}} {float(LAYOUT.block_bytes)}' in text
    assert 'method="/halfmoon.KVStoreBytes/Put"' in text
