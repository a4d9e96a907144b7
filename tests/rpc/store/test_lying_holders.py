"""Holders of blocks that answer what they were not asked: each lie is a miss, never an error of ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import grpc
import pytest
import zstandard
from prometheus_client import CollectorRegistry

from halfmoon.errors import DataLoss, Incompatible
from halfmoon.kv.codec import Codec
from halfmoon.kv.frame import Frame, FrameKind, KVRange, decode_frame, encode_frame
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.negotiation import Acceptance
from halfmoon.kv.receiver import TransferReceiver
from halfmoon.pb import kvstore_pb2
from halfmoon.rpc.server import running_server
from halfmoon.rpc.store.block_streams import BYTES_SERVICE, whole_blocks
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.transfer import raw_service
from halfmoon.rpc.transport.link import LinkSettings

LAYOUT = KVLayout(2, 2, 4, "float32", 4)
KEYS = [bytes([n]) * 16 for n in range(3)]
WHOLE = whole_blocks(LAYOUT, 0, 1)
LIMIT_S = 20.0


class Liar:
    """A store or a worker whose answers are given."""

    def __init__(self) -> None:
        self.matched = kvstore_pb2.MatchResponse()
        self.taken = kvstore_pb2.TakeResponse()
        self.before: list[Frame] = []
        self.data = Frame(FrameKind.DATA, bytes(16), LAYOUT.fingerprint(), 0, WHOLE, payload=bytes(LAYOUT.block_bytes))

    async def match(self, request: object, context: grpc.aio.ServicerContext) -> kvstore_pb2.MatchResponse:
        return self.matched

    async def take(self, request: object, context: grpc.aio.ServicerContext) -> kvstore_pb2.TakeResponse:
        return self.taken

    async def get(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        await anext(messages)
        for frame in self.before:
            yield encode_frame(frame)
        yield encode_frame(self.data)

    async def put(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        receiver = TransferReceiver(LAYOUT)
        receiver.handle(decode_frame(await anext(messages)))
        yield encode_frame(receiver.accept(Acceptance("grpc", held_tokens=1)))
        async for _ in messages:
            pass

    def add_to(self, server: grpc.aio.Server) -> None:
        match = grpc.unary_unary_rpc_method_handler(
            self.match, kvstore_pb2.MatchRequest.FromString, kvstore_pb2.MatchResponse.SerializeToString
        )
        take = grpc.unary_unary_rpc_method_handler(
            self.take, kvstore_pb2.TakeRequest.FromString, kvstore_pb2.TakeResponse.SerializeToString
        )
        handlers = grpc.method_handlers_generic_handler("halfmoon.KVStore", {"Match": match, "Take": take})
        server.add_generic_rpc_handlers((handlers,))
        raw_service(BYTES_SERVICE, {"Get": self.get, "Put": self.put})(server)


@asynccontextmanager
async def asked(liar: Liar, transports: tuple[str, ...] = ()) -> AsyncIterator[KVStoreClient]:
    async with running_server("127.0.0.1:0", [liar.add_to], RpcMetrics(CollectorRegistry()), grace_s=0) as server:
        client = KVStoreClient(f"127.0.0.1:{server.port}", link_settings=LinkSettings(transports))
        try:
            yield client
        finally:
            await client.close()


@pytest.mark.parametrize(
    "answer",
    [
        {"tiers": [0, 0, 0, 0]},  # of three keys
        {"tiers": [0, 99]},
        {"tiers": [0], "places": [3]},
        {"tiers": [0], "places": [0, 1]},
    ],
)
async def test_a_holder_that_has_more_than_it_was_asked_for_has_nothing(answer: dict[str, list[int]]) -> None:
    liar = Liar()
    liar.matched = kvstore_pb2.MatchResponse(num_matched=3, **answer)  # type: ignore[arg-type]
    async with asked(liar) as client:
        with pytest.raises(DataLoss):
            await client.match(KEYS, deadline_s=LIMIT_S)
        with pytest.raises(DataLoss):
            await client.look_up(KEYS, deadline_s=LIMIT_S)


async def test_a_leading_run_has_no_gaps() -> None:
    liar = Liar()
    liar.matched = kvstore_pb2.MatchResponse(num_matched=2, tiers=[1, 0], places=[2, 0])  # type: ignore[list-item]
    async with asked(liar) as client:
        assert await client.match(KEYS, deadline_s=LIMIT_S) == ["dram"]


@pytest.mark.parametrize(
    "changes",
    [
        {"payload": bytes(LAYOUT.block_bytes // 2)},
        {"payload": b""},
        {"layout_fingerprint": replace(LAYOUT, dtype="bfloat16").fingerprint()},
        {"codec": Codec.INT8},
        {"kind": FrameKind.CREDIT},
        {"range": KVRange(0, 1, 0, 2, 0, 4)},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_a_block_of_another_layout_encoding_or_size_is_a_miss(changes: dict[str, object]) -> None:
    liar = Liar()
    async with asked(liar) as client:
        async with aclosing(client.get_run(KEYS[:1], LAYOUT, deadline_s=LIMIT_S)) as blocks:
            assert bytes(await anext(blocks)) == bytes(LAYOUT.block_bytes)
        liar.data = replace(liar.data, **changes)  # type: ignore[arg-type]
        with pytest.raises(DataLoss):
            await client.get(KEYS[0], LAYOUT, deadline_s=LIMIT_S)


@pytest.mark.parametrize("num_blocks", [None, 0, 4, 2])
async def test_a_get_by_layer_without_as_many_blocks_as_were_promised_is_a_miss(num_blocks: int | None) -> None:
    """Of three: no promise, none, too many, and two of which one comes, twice."""
    liar = Liar()
    liar.before = [] if num_blocks is None else [replace(liar.data, kind=FrameKind.ACCEPT, sequence=num_blocks)]
    liar.before += [liar.data] if num_blocks == 2 else []
    async with asked(liar) as client, aclosing(client.get_layers(KEYS, LAYOUT, 2, deadline_s=LIMIT_S)) as parts:
        with pytest.raises(DataLoss):
            await anext(parts)


@pytest.mark.parametrize("payload", [b"no encoding", zstandard.compress(bytes(1 << 24)), b""])
async def test_a_block_that_does_not_decode_is_a_miss(payload: bytes) -> None:
    liar = Liar()
    liar.data = replace(liar.data, codec=Codec.ZSTD, payload=payload)
    async with asked(liar) as client:
        async with aclosing(client.get_run(KEYS[:1], LAYOUT, codec=Codec.ZSTD, deadline_s=LIMIT_S)) as blocks:
            with pytest.raises(DataLoss):
                await anext(blocks)
        async with aclosing(client.get_run(KEYS[:1], LAYOUT, codec=Codec.LZ4, deadline_s=LIMIT_S)) as blocks:
            with pytest.raises(DataLoss, match="another layout, encoding or size"):
                await anext(blocks)


@pytest.mark.parametrize(("num_held", "num_new"), [(4, 0), (1, 2)])
async def test_a_store_takes_no_more_than_it_was_offered(num_held: int, num_new: int) -> None:
    liar = Liar()
    liar.taken = kvstore_pb2.TakeResponse(num_held=num_held, num_new=num_new)
    cells = [bytes(LAYOUT.block_bytes)] * 3
    async with asked(liar, ("shm",)) as client:
        with pytest.raises(DataLoss):
            await client.put_run(KEYS, LAYOUT, cells, deadline_s=LIMIT_S)


async def test_a_store_holds_no_part_of_a_block_that_it_accepts() -> None:
    async with asked(Liar()) as client:
        with pytest.raises(Incompatible, match="holds 1 tokens"):
            await client.put(KEYS[0], LAYOUT, bytes(LAYOUT.block_bytes), deadline_s=LIMIT_S)
