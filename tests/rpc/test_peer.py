"""What a channel makes of calls that end in gRPC's own ways: everything is an error of our tree."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest
from prometheus_client import CollectorRegistry

from halfmoon.errors import DataLoss, Unavailable
from halfmoon.pb.decode_pb2 import StepTokens
from halfmoon.rpc.context import bounded_deadline_s, request_id, request_scope
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics


@asynccontextmanager
async def peer_of(handler: grpc.RpcMethodHandler) -> AsyncIterator[Peer]:
    def add(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"M": handler}),))

    async with (
        running_server("127.0.0.1:0", [add], RpcMetrics(CollectorRegistry())) as server,
        Peer(f"127.0.0.1:{server.port}") as peer,
    ):
        yield peer


async def test_a_closed_channel_is_unavailable() -> None:
    peer = Peer("127.0.0.1:1")
    unary, stream = peer.channel.unary_unary("/t.T/M"), peer.channel.unary_stream("/t.T/M")
    await peer.close()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 is closed"):
        await peer.call(unary, b"", deadline_s=5)
    with pytest.raises(Unavailable):
        async with peer.stream(stream, b"", deadline_s=5):
            pass
    with pytest.raises(Unavailable):
        peer.raw_stream("/t.T/M", deadline_s=5)


async def test_a_channel_that_closes_under_a_call_is_unavailable() -> None:
    came = asyncio.Event()

    async def never(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        came.set()
        await asyncio.Event().wait()
        return b""

    async with peer_of(grpc.unary_unary_rpc_method_handler(never)) as peer:
        calling = asyncio.ensure_future(peer.call(peer.channel.unary_unary("/t.T/M"), b"", deadline_s=60))
        await asyncio.wait_for(came.wait(), 20)
        await peer.close()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(calling, 20)


async def test_a_message_that_cannot_be_parsed_is_data_loss() -> None:
    async def garbage(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield b"\xff\xff\xff"

    async def one(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return b"\xff\xff\xff"

    async with peer_of(grpc.unary_stream_rpc_method_handler(garbage)) as peer:
        method = peer.channel.unary_stream("/t.T/M", response_deserializer=StepTokens.FromString)
        with pytest.raises(DataLoss):
            async with peer.stream(method, b"", deadline_s=20) as steps:
                await anext(steps)
    async with peer_of(grpc.unary_unary_rpc_method_handler(one)) as peer:
        unary = peer.channel.unary_unary("/t.T/M", response_deserializer=StepTokens.FromString)
        with pytest.raises(DataLoss):
            await peer.call(unary, b"", deadline_s=20)


async def echo(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


async def test_a_request_iterator_that_fails_is_unavailable() -> None:
    async def messages() -> AsyncIterator[bytes]:
        yield b"one"
        raise RuntimeError("no second message")

    async with peer_of(grpc.stream_stream_rpc_method_handler(echo)) as peer:
        method = peer.channel.stream_stream("/t.T/M")
        async with peer.stream(method, messages(), deadline_s=20) as answers:
            with pytest.raises(Unavailable):
                _ = [answer async for answer in answers]


async def test_our_own_cancellation_stays_one() -> None:
    begun = asyncio.Event()

    async def messages() -> AsyncIterator[bytes]:
        yield b"one"
        await asyncio.Event().wait()

    async def read(peer: Peer) -> None:
        async with peer.stream(peer.channel.stream_stream("/t.T/M"), messages(), deadline_s=60) as answers:
            async for _ in answers:
                begun.set()

    async with peer_of(grpc.stream_stream_rpc_method_handler(echo)) as peer:
        reading = asyncio.ensure_future(read(peer))
        await asyncio.wait_for(begun.wait(), 20)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


def test_a_scope_that_ends_in_another_context() -> None:
    def work() -> Iterator[None]:
        with request_scope("r-1", remaining_s=5):
            yield

    generator = work()
    contextvars.copy_context().run(next, generator)
    with pytest.raises(StopIteration):
        next(generator)
    assert request_id() == ""
    assert bounded_deadline_s(1000) == 1000
