"""Channels survive idleness, and notice a link that vanished without a word. All of it forty times faster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from halfmoon.rpc import peer as peer_module
from halfmoon.rpc import server as server_module
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.transfer import raw_service

SPEED = 40
NUM_PINGS = 5  # a server that finds them too many says so after the third
PING_BYTES = 17  # an HTTP/2 frame header and eight bytes


class Proxy:
    """Passes bytes on between one client and a server, until it is told to swallow them."""

    def __init__(self) -> None:
        self.swallows = False
        self.num_bytes = 0  # from client to server
        self.num_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def to(self, port: int) -> AsyncIterator[int]:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_connections += 1
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            self._tasks |= {
                asyncio.create_task(self._pass_on(reader, far_writer, counts=True)),
                asyncio.create_task(self._pass_on(far_reader, writer, counts=False)),
            }

        listener = await asyncio.start_server(accept, "127.0.0.1", 0)
        try:
            yield listener.sockets[0].getsockname()[1]
        finally:
            listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: bool) -> None:
        try:
            while data := await reader.read(65536):
                self.num_bytes += len(data) * counts
                if not self.swallows:
                    writer.write(data)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


class Handler:
    """Answers the first message, then waits for more as long as its caller is there."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def serve(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            async for message in messages:
                yield message
        finally:
            self.ended.set()


def faster(options: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value // SPEED if name.endswith("_ms") else value) for name, value in options)


def patient(options: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, 60_000 if name.endswith("timeout_ms") else value) for name, value in options)


@pytest.fixture(autouse=True)
def _faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "CHANNEL_OPTIONS", faster(peer_module.CHANNEL_OPTIONS))
    monkeypatch.setattr(server_module, "_OPTIONS", faster(server_module._OPTIONS))


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Peer, Proxy, Handler]]:
    handler, proxy = Handler(), Proxy()
    services = [raw_service("test.Idle", {"Echo": handler.serve})]
    async with (
        running_server("127.0.0.1:0", services, RpcMetrics(CollectorRegistry()), grace_s=0) as server,
        proxy.to(server.port) as port,
        Peer(f"127.0.0.1:{port}") as peer,
    ):
        yield peer, proxy, handler


async def echo(peer: Peer) -> grpc.aio.StreamStreamCall:
    call = peer.raw_stream("/test.Idle/Echo", deadline_s=60)
    await call.write(b"hello")
    assert await call.read() == b"hello"
    return call


@pytest.mark.parametrize("with_call", [True, False], ids=["an open stream", "no call"])
async def test_a_server_bears_an_idle_channel_and_its_pings(with_call: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own pings are off: they would spare the client its own, of which a server may find too many.

    No answer to a ping is too late here: a busy machine takes half a second at times.
    """
    silent = [option for option in server_module._OPTIONS if option[0] != "grpc.keepalive_time_ms"]
    monkeypatch.setattr(server_module, "_OPTIONS", patient(silent))
    monkeypatch.setattr(peer_module, "CHANNEL_OPTIONS", patient(peer_module.CHANNEL_OPTIONS))
    async with linked() as (peer, proxy, handler):
        call = await echo(peer)
        if not with_call:
            call.cancel()
            await handler.ended.wait()
        before = proxy.num_bytes
        async with asyncio.timeout(60):
            while proxy.num_bytes < before + NUM_PINGS * PING_BYTES:  # noqa: ASYNC110 - pings have no event
                await asyncio.sleep(0.01)
        if with_call:
            await call.write(b"still there")
            assert await call.read() == b"still there"
        else:
            (await echo(peer)).cancel()
        assert proxy.num_connections == 1


async def test_both_ends_notice_a_link_that_swallows_everything() -> None:
    async with linked() as (peer, proxy, handler):
        call = await echo(peer)
        proxy.swallows = True
        async with asyncio.timeout(30):
            await handler.ended.wait()
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
