"""A receiver of KV that keeps what it gets in memory, served over loopback in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from halfmoon.errors import HalfmoonError
from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.receiver import Effect, Reserve, Write, WriteFromDevice
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.transfer import KV_TRANSFER, PUSH, KVIntake, raw_service
from halfmoon.rpc.transport.cuda_ipc import DeviceMemory
from halfmoon.rpc.transport.link import KVLink, LinkSettings
from halfmoon.rpc.transport.protocol import Inlet

LAYOUT = KVLayout(4, 2, 64, "float16", 64)
TOKENS = 256
WHOLE = KVRange(0, 4, 0, 2, 0, TOKENS)
LAYERS = [KVRange(layer, layer + 1, 0, 2, 0, TOKENS) for layer in range(4)]  # 128 KiB each


def kv_of(seed: int) -> NDArray[np.uint8]:
    """Random bytes of a whole transfer, [layers, bytes of a layer]."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (4, TOKENS * LAYOUT.token_layer_bytes), dtype=np.uint8)


class Sink:
    """What arrived, by the body of the transfer's OPEN. `gates` hold transfers back before they take a payload."""

    def __init__(self, inlets: list[Inlet] | None, lease_s: float) -> None:
        self.intake = KVIntake(inlets)
        self.layout = LAYOUT
        self.arrived: dict[bytes, dict[int, bytes]] = {}  # by layer
        self.gates: dict[bytes, asyncio.Event] = {}
        self.running: set[bytes] = set()  # reserved, neither committed nor freed
        self.errors: list[HalfmoonError] = []
        self._lease_s = lease_s

    async def push(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        name = b""

        async def act(effect: Effect) -> None:
            nonlocal name
            if isinstance(effect, Reserve):
                name = effect.body
                self.running.add(name)
                self.arrived[name] = {}
            elif isinstance(effect, Write):
                if name in self.gates:
                    await self.gates[name].wait()
                self.arrived[name][effect.range.layer_start] = bytes(effect.payload)
            elif isinstance(effect, WriteFromDevice):
                if name in self.gates:
                    await self.gates[name].wait()
                assert isinstance(effect.source.cells, np.ndarray)  # of a fake device
                self.arrived[name][effect.range.layer_start] = effect.source.cells.tobytes()

        try:
            async with aclosing(self.intake.receive(messages, self.layout, act, self._lease_s)) as answers:
                async for answer in answers:
                    yield answer
        except HalfmoonError as error:
            self.errors.append(error)
            raise
        finally:
            self.running.discard(name)

    def got(self, name: bytes) -> NDArray[np.uint8]:
        """A whole transfer, as `kv_of` made it."""
        layers = [np.frombuffer(self.arrived[name][layer], np.uint8) for layer in range(4)]
        return np.stack(layers)


class Ends:
    """A sink and a link to it."""

    def __init__(self, sink: Sink, link: KVLink, declined: list[str]) -> None:
        self.sink = sink
        self.link = link
        self.declined = declined


@asynccontextmanager
async def ends(
    settings: LinkSettings | None = None,
    inlets: list[Inlet] | None = None,
    lease_s: float = 30,
    host: str = "127.0.0.1",
    device: DeviceMemory | None = None,
    credential: Credential | None = None,
) -> AsyncIterator[Ends]:
    """Both ends in this process."""
    sink = Sink(inlets, lease_s)
    add = raw_service(KV_TRANSFER, {PUSH: sink.push})
    metrics, access = RpcMetrics(CollectorRegistry()), CallAccess(credential)
    async with running_server(f"{host}:0", [add], metrics, grace_s=0, access=access) as server:
        declined: list[str] = []
        link = KVLink(Peer(f"{host}:{server.port}", credential, "worker"), settings, declined.append, device)
        try:
            yield Ends(sink, link, declined)
        finally:
            await link.close()
            sink.intake.close()


class Wire:
    """A transfer's call without a network. Its receiver hears of a cancellation after all that was sent before."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[bytes] = asyncio.Queue()
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def write(self, message: bytes) -> None:
        self.sent.put_nowait(message)

    async def read(self) -> bytes:
        return await self.answers.get()

    def cancel(self) -> None:
        self.sent.put_nowait(b"")

    async def messages(self) -> AsyncIterator[bytes]:
        while message := await self.sent.get():
            yield message


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what has no event."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is watched has no event
            await asyncio.sleep(0.002)


Served = Callable[..., AbstractAsyncContextManager[Ends]]


@contextmanager
def raising(error: type[HalfmoonError], match: str) -> Iterator[None]:
    """`error` itself, not one of its heirs."""
    with pytest.raises(error, match=match) as caught:
        yield
    assert type(caught.value) is error
