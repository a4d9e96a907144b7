"""Device memory as the transport sees it: a fake device, whose memory is bytes that only `cells` leads to."""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from weakref import WeakValueDictionary

import numpy as np
import pytest
from numpy.typing import NDArray

from halfmoon.errors import DataLoss, HalfmoonError, Incompatible, InvalidRequest, Unavailable
from halfmoon.kv.codec import Codec
from halfmoon.kv.device_bytes import DeviceBytes
from halfmoon.kv.frame import MAX_PAYLOAD_BYTES, Elsewhere, Frame, FrameKind, decode_message, encode_frame
from halfmoon.rpc.transfer import TransferSender, transfer_to
from halfmoon.rpc.transport.cuda_ipc import CudaIpcInlet, DeviceRegion
from halfmoon.rpc.transport.link import LinkSettings
from halfmoon.rpc.transport.memfd import SharedSegment, host_id
from halfmoon.rpc.transport.shm import SharedMemoryInlet
from halfmoon.rpc.transport.slots import Reference
from tests.rpc.transport.conftest import LAYERS, LAYOUT, WHOLE, Ends, ends, kv_of, raising, until

CUDA_IPC = LinkSettings(transports=("cuda_ipc", "shm"), window_bytes=2 * MAX_PAYLOAD_BYTES)


class FakeRegion:
    """Some of the host's memory, as if it were a device's."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory  # [num_bytes] uint8
        self.num_bytes = memory.nbytes

    def part(self, offset: int, num_bytes: int) -> DeviceBytes:
        return DeviceBytes(num_bytes, self.memory[offset : offset + num_bytes])


class FakeHost:
    """The regions that the processes of one host could open; gone when their owner drops them."""

    def __init__(self) -> None:
        self.regions: WeakValueDictionary[bytes, FakeRegion] = WeakValueDictionary()


class FakeDevice:
    """One process's device."""

    def __init__(self, host: FakeHost, refuses: HalfmoonError | None = None) -> None:
        self._host = host
        self._refuses = refuses
        self.opened: WeakValueDictionary[bytes, FakeRegion] = WeakValueDictionary()
        self.num_opened = 0

    def allocate(self, num_bytes: int) -> tuple[DeviceRegion, bytes]:
        if self._refuses is not None:
            raise self._refuses
        region = FakeRegion(np.zeros(num_bytes, np.uint8))
        name = secrets.token_hex(8).encode()
        self._host.regions[name] = region
        return region, name

    def open(self, exported: bytes) -> DeviceRegion:
        if self._refuses is not None:
            raise self._refuses
        if exported not in self._host.regions:
            raise Unavailable("no such region")
        self.num_opened += 1
        self.opened[exported] = region = FakeRegion(self._host.regions[exported].memory)
        return region


async def send(transfer: TransferSender, layer: int, seed: int) -> None:
    buffer = await transfer.buffer(kv_of(seed)[layer].nbytes)
    place = buffer.place
    if isinstance(place, DeviceBytes):
        assert isinstance(place.cells, np.ndarray)
        place.cells[:] = kv_of(seed)[layer]
    else:
        np.copyto(np.frombuffer(place, np.uint8), kv_of(seed)[layer])
    del place
    await transfer.data(LAYERS[layer], buffer)


async def whole_transfer(it: Ends, name: bytes, seed: int) -> str:
    async with transfer_to(it.link, LAYOUT, deadline_s=30) as transfer:
        await transfer.open(WHOLE, name)
        for layer in range(4):
            await send(transfer, layer, seed)
        await transfer.commit(b"")
        assert (it.sink.got(name) == kv_of(seed)).all()
        return transfer.transport


def serving(receiver: FakeDevice, sender: FakeDevice | None) -> AbstractAsyncContextManager[Ends]:
    return ends(CUDA_IPC, [CudaIpcInlet(receiver), SharedMemoryInlet()], device=sender)


async def test_slots_of_one_ring_carry_one_transfer_after_the_other() -> None:
    host = FakeHost()
    receiver = FakeDevice(host)
    async with serving(receiver, FakeDevice(host)) as it:
        for number in range(5):
            assert await whole_transfer(it, b"%d" % number, number) == "cuda_ipc"
        sending = [whole_transfer(it, b"at once %d" % number, number) for number in range(10)]
        assert set(await asyncio.gather(*sending)) == {"cuda_ipc"}
        assert receiver.num_opened == 1
        assert it.link.window.free_bytes == it.link.window.limit_bytes
        assert not it.declined


async def test_a_slot_is_not_used_again_before_its_credit() -> None:
    host = FakeHost()
    async with serving(FakeDevice(host), FakeDevice(host)) as it:
        gate = it.sink.gates[b"1"] = asyncio.Event()
        async with transfer_to(it.link, LAYOUT, deadline_s=30) as transfer:
            await transfer.open(WHOLE, b"1")
            await send(transfer, 0, 1)
            waiting = asyncio.create_task(send(transfer, 1, 1))
            await until(lambda: bool(it.link.window._waiting))
            assert not waiting.done()  # a transfer may hold half of a window, here one slot of two
            gate.set()
            await waiting
            for layer in (2, 3):
                await send(transfer, layer, 1)
            await transfer.commit(b"")
            assert (it.sink.got(b"1") == kv_of(1)).all()


async def test_host_memory_travels_in_its_messages() -> None:
    host = FakeHost()
    async with (
        serving(FakeDevice(host), FakeDevice(host)) as it,
        transfer_to(it.link, LAYOUT, deadline_s=30) as transfer,
    ):
        await transfer.open(WHOLE, b"1")
        for layer, part in enumerate(LAYERS):
            await transfer.data(part, kv_of(1)[layer].tobytes())
        await transfer.commit(b"")
        assert transfer.transport == "cuda_ipc"
        assert (it.sink.got(b"1") == kv_of(1)).all()
        assert it.link.window.free_bytes == it.link.window.limit_bytes


@pytest.mark.parametrize("error", [Incompatible("another process's GPU"), Unavailable("CUDA says no")])
async def test_what_the_receiver_cannot_open_goes_by_the_next_transport(error: HalfmoonError) -> None:
    receiver = FakeDevice(FakeHost(), error)
    async with serving(receiver, FakeDevice(FakeHost())) as it:
        assert await whole_transfer(it, b"1", 1) == "shm"
        assert it.declined == ["cuda_ipc"]


async def test_another_host_is_declined_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeHost()
    receiver = FakeDevice(host)
    monkeypatch.setattr("halfmoon.rpc.transport.cuda_ipc.host_id", lambda: "elsewhere")
    async with serving(receiver, FakeDevice(host)) as it:
        assert await whole_transfer(it, b"1", 1) == "shm"
        assert it.declined == ["cuda_ipc"]
        assert receiver.num_opened == 0


@pytest.mark.parametrize("sender", [None, FakeDevice(FakeHost(), Unavailable("out of memory"))], ids=["none", "full"])
async def test_a_sender_without_device_memory_does_not_offer_it(sender: FakeDevice | None) -> None:
    receiver = FakeDevice(FakeHost())
    async with serving(receiver, sender) as it:
        assert await whole_transfer(it, b"1", 1) == "shm"
        assert it.declined == ["cuda_ipc"]


async def test_a_transfer_in_a_codec_goes_by_the_next_transport() -> None:
    host = FakeHost()
    async with serving(FakeDevice(host), FakeDevice(host)) as it:
        async with transfer_to(it.link, LAYOUT, deadline_s=30) as transfer:
            await transfer.open(WHOLE, b"1", Codec.INT8)
            assert transfer.transport == "shm"
        assert not it.declined  # nothing went wrong


async def test_a_slot_that_is_still_being_filled_waits_for_its_writer() -> None:
    host = FakeHost()
    receiver = FakeDevice(host)
    async with serving(receiver, FakeDevice(host)) as it:
        async with transfer_to(it.link, LAYOUT, deadline_s=30) as transfer:
            await transfer.open(WHOLE, b"1")
            writer = (await transfer.buffer(1000)).place
        assert it.link.window.free_bytes < it.link.window.limit_bytes
        del writer
        assert await whole_transfer(it, b"2", 2) == "cuda_ipc"
        assert it.link.window.free_bytes == it.link.window.limit_bytes


async def test_both_ends_let_go_of_the_ring_when_the_sender_goes() -> None:
    host = FakeHost()
    receiver = FakeDevice(host)
    async with serving(receiver, FakeDevice(host)) as it:
        await whole_transfer(it, b"1", 1)
        assert len(receiver.opened) == 1
        await it.link.close()  # as the kernel does when its process dies: the connection ends
        await until(lambda: gc.collect() >= 0 and not receiver.opened)
    del it
    gc.collect()
    assert not host.regions


async def test_a_transfer_keeps_the_ring_that_its_sender_has_left() -> None:
    host = FakeHost()
    receiver = FakeDevice(host)
    ring, exported = FakeDevice(host).allocate(4096)
    segment = SharedSegment(4096)
    segment.memory[: len(exported)] = exported
    inlet = CudaIpcInlet(receiver)
    source = await inlet.join(offer_of(segment))
    segment.close()
    await until(lambda: not inlet._segments._segments)
    assert (await source.fetch(Reference(96).encoded(), 4000)).num_bytes == 4000
    with raising(InvalidRequest, "outside"):
        await source.fetch(Reference(97).encoded(), 4000)
    assert len(receiver.opened) == 1
    source.close()
    del source, ring
    gc.collect()
    assert not receiver.opened
    inlet.close()


def offer_of(segment: SharedSegment) -> bytes:
    return f"{host_id()}/{segment.name}".encode()


def _frame(num_bytes: int = 10) -> bytes:
    frame = Frame(FrameKind.DATA, bytes(16), 7, 3, LAYERS[0], device=DeviceBytes(num_bytes, None))
    return encode_frame(frame, Reference(64).encoded())


def test_a_frame_on_the_device_comes_back_with_its_place() -> None:
    message = decode_message(_frame())
    assert isinstance(message, Elsewhere)
    place = DeviceBytes(10, None)
    frame = message.with_payload(place)
    assert frame.device is place
    assert (frame.payload, frame.payload_bytes, frame.range) == (b"", 10, LAYERS[0])


@pytest.mark.parametrize(
    ("damage", "num_bytes"),
    [(lambda data: data[:40] + b"\1" + data[41:], 10), (lambda data: data[:-1] + b"\1", 10), (lambda data: data, 9)],
    ids=["header", "reference", "size"],
)
def test_header_reference_and_size_of_a_frame_on_the_device_are_checked(
    damage: Callable[[bytes], bytes], num_bytes: int
) -> None:
    message = decode_message(damage(_frame()))
    assert isinstance(message, Elsewhere)
    with raising(DataLoss, "."):
        message.with_payload(DeviceBytes(num_bytes, None))


def test_a_frame_on_the_device_obeys_the_limit() -> None:
    with raising(InvalidRequest, "over the limit"):
        _frame(MAX_PAYLOAD_BYTES + 1)
