"""Server, interceptor, peer and transfer together over a real loopback channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from prometheus_client import CollectorRegistry

from halfmoon.errors import HalfmoonError, Incompatible, InvalidRequest, NoCapacity, Unavailable
from halfmoon.kv.frame import Frame, KVRange, decode_frame, encode_frame
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.negotiation import INLINE, Acceptance
from halfmoon.kv.receiver import Commit, Reserve, TransferReceiver, Write
from halfmoon.rpc.context import bounded_deadline_s, request_id, request_scope
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import RunningServer, running_server
from halfmoon.rpc.status import error_from
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.transfer import raw_service, transfer_to

LAYOUT = KVLayout(2, 2, 4, "float32", 8)
Unary = Callable[[bytes, grpc.aio.ServicerContext], object]


def methods(**handlers: grpc.RpcMethodHandler) -> Callable[[grpc.aio.Server], None]:
    return lambda server: server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))


async def call(server: RunningServer, name: str = "M", deadline_s: float = 5) -> bytes:
    async with Peer(f"127.0.0.1:{server.port}") as peer:
        return bytes(await peer.call(peer.channel.unary_unary(f"/t.T/{name}"), b"x", deadline_s=deadline_s))


async def test_errors_cross_the_wire_whole() -> None:
    async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        raise NoCapacity("full", param="blocks", retry_after_ms=70)

    registry = CollectorRegistry()
    add = methods(M=grpc.unary_unary_rpc_method_handler(refuse))
    async with running_server("127.0.0.1:0", [add], RpcMetrics(registry)) as server:
        with pytest.raises(NoCapacity) as caught:
            await call(server)
    assert (caught.value.message, caught.value.param, caught.value.retry_after_ms) == ("full", "blocks", 70)
    handled = {"method": "/t.T/M", "status": "RESOURCE_EXHAUSTED"}
    assert registry.get_sample_value("halfmoon_rpc_handled_total", handled) == 1


async def test_text_of_unknown_exceptions_is_hidden() -> None:
    async def fail(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        raise RuntimeError("secret")

    add = methods(M=grpc.unary_unary_rpc_method_handler(fail))
    async with running_server("127.0.0.1:0", [add], RpcMetrics(CollectorRegistry())) as server:
        with pytest.raises(HalfmoonError) as caught:
            await call(server)
    assert type(caught.value) is HalfmoonError
    assert "secret" not in str(caught.value)


async def test_an_inner_cancellation_answers_at_once() -> None:
    async def cancelled(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        raise asyncio.CancelledError

    add = methods(M=grpc.unary_unary_rpc_method_handler(cancelled))
    async with running_server("127.0.0.1:0", [add], RpcMetrics(CollectorRegistry())) as server:
        with pytest.raises(Unavailable):
            await asyncio.wait_for(call(server, deadline_s=60), 30)


async def test_deadline_and_request_id_travel_on() -> None:
    async def inner(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return f"{request_id()} {0 < bounded_deadline_s(1000) < 8}".encode()

    add = methods(M=grpc.unary_unary_rpc_method_handler(inner))
    async with running_server("127.0.0.1:0", [add], RpcMetrics(CollectorRegistry())) as server:
        with request_scope("r-1", remaining_s=7):
            assert await call(server, deadline_s=500) == b"r-1 True"


async def test_leaving_a_stream_ends_the_handler() -> None:
    ended = asyncio.Event()

    async def endless(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"tick"
                await asyncio.sleep(0.001)
        finally:
            ended.set()

    add = methods(M=grpc.unary_stream_rpc_method_handler(endless))
    async with (
        running_server("127.0.0.1:0", [add], RpcMetrics(CollectorRegistry())) as server,
        Peer(f"127.0.0.1:{server.port}") as peer,
    ):
        async with peer.stream(peer.channel.unary_stream("/t.T/M"), b"x", deadline_s=60) as ticks:
            async for tick in ticks:
                assert tick == b"tick"
                break
        await asyncio.wait_for(ended.wait(), 10)


async def test_a_taken_port_is_a_clear_error() -> None:
    async with running_server("127.0.0.1:0", [], RpcMetrics(CollectorRegistry())) as server:
        with pytest.raises(InvalidRequest, match="port"):
            async with running_server(f"127.0.0.1:{server.port}", [], RpcMetrics(CollectorRegistry())):
                pass


async def test_a_transfer_sends_frames_and_gets_answers() -> None:
    got: list[Frame] = []

    async def push(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        receiver = TransferReceiver(LAYOUT)
        async for message in messages:
            frame = decode_frame(message)
            got.append(frame)
            match receiver.handle(frame):
                case Reserve():
                    yield encode_frame(receiver.accept(Acceptance(INLINE)))
                case Write():
                    yield encode_frame(receiver.credit(frame.sequence))
                case Commit():
                    yield encode_frame(receiver.done())

    async with (
        running_server(
            "127.0.0.1:0", [raw_service("halfmoon.KVTransfer", {"Push": push})], RpcMetrics(CollectorRegistry())
        ) as server,
        Peer(f"127.0.0.1:{server.port}") as peer,
        transfer_to(peer, LAYOUT, deadline_s=10) as transfer,
    ):
        await transfer.open(KVRange(0, 2, 0, 2, 0, 8), b"open")
        await transfer.renew()
        await transfer.data(KVRange(0, 2, 0, 2, 0, 8), bytes(1024))
        await transfer.commit(b"commit")
    assert [frame.kind.name for frame in got] == ["OPEN", "RENEW", "DATA", "COMMIT"]
    assert [frame.sequence for frame in got] == [0, 1, 2, 3]


@pytest.mark.parametrize("after_open", [False, True])
async def test_a_refusal_reaches_the_sender_wherever_it_is(after_open: bool) -> None:
    async def push(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        receiver = TransferReceiver(LAYOUT)
        async for message in messages:
            if isinstance(receiver.handle(decode_frame(message)), Reserve) and after_open:
                yield encode_frame(receiver.accept(Acceptance(INLINE)))
            else:
                raise NoCapacity("no blocks", retry_after_ms=5)

    async with (
        running_server(
            "127.0.0.1:0", [raw_service("halfmoon.KVTransfer", {"Push": push})], RpcMetrics(CollectorRegistry())
        ) as server,
        Peer(f"127.0.0.1:{server.port}") as peer,
        transfer_to(peer, LAYOUT, deadline_s=10) as transfer,
    ):
        if after_open:
            await transfer.open(KVRange(0, 2, 0, 2, 0, 8), b"")
            await transfer.renew()
            with pytest.raises(NoCapacity):
                await transfer.until_broken()
            with pytest.raises(NoCapacity):
                await transfer.data(KVRange(0, 1, 0, 2, 0, 8), bytes(512))
        else:
            with pytest.raises(NoCapacity, match="no blocks"):
                await transfer.open(KVRange(0, 2, 0, 2, 0, 8), b"")


async def test_nobody_there_is_unavailable() -> None:
    async with Peer("127.0.0.1:1") as peer, transfer_to(peer, LAYOUT, deadline_s=5) as transfer:
        with pytest.raises((Unavailable, Incompatible)):
            await transfer.open(KVRange(0, 2, 0, 2, 0, 8), b"")


def test_an_internal_error_of_grpc_itself_is_a_broken_connection() -> None:
    failure = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "Internal error from Core"
    )
    assert type(error_from(failure)) is Unavailable


class OnlyHere(NoCapacity):
    """An error that is made in its own way, and that no service sends."""

    def __init__(self) -> None:
        super().__init__("made here", retry_after_ms=1)


@pytest.mark.parametrize("name", ["NoCapacity", "OnlyHere", "Nonsense"])
@pytest.mark.parametrize(("given", "read"), [("70", 70), ("1.5", None), ("-1", None), ("²", None), ("9" * 5000, None)])
def test_no_trailer_of_a_peer_breaks_the_error(name: str, given: str, read: int | None) -> None:
    trailers = grpc.aio.Metadata(("halfmoon-error", name), ("retry-after-ms", given))
    error = error_from(grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailers, "full"))
    assert (type(error), error.message, error.retry_after_ms) == (NoCapacity, "full", read)
