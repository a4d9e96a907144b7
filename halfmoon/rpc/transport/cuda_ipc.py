"""The transport `cuda_ipc`: payloads in device memory that sender and receiver share, on one host with GPUs.

A link has one ring of slots in the sender's device memory, used like those of `shm`. The engines gather into a slot and
scatter out of it on their devices and wait for completion: the sender before it announces the frame, the receiver
before it grants credit. So no stream or event is shared.

A small shared segment, not the stream, tells the receiver how to reach the ring: only processes of the same user on the
same host can read it, and when the sender ends, the receiver sees the connection close and releases the ring.

The digest of such a frame covers only its header and its reference: a CPU cannot read the payload, and this memory is
neither a network nor a disk. Encoded frames use another transport, since codecs compute on the CPU.

If the sender dies in the middle of a scatter, the result is up to CUDA: the manual calls memory freed by its owner
undefined.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Protocol
from weakref import WeakKeyDictionary

from halfmoon.errors import Incompatible
from halfmoon.kv.device_bytes import DeviceBytes
from halfmoon.kv.negotiation import Offer
from halfmoon.rpc.transport.memfd import SharedSegment, host_id
from halfmoon.rpc.transport.protocol import Source, StagingBuffer
from halfmoon.rpc.transport.shm import SharedMemoryInlet
from halfmoon.rpc.transport.slots import USE_BYTES, FreeSlots, Reference, decode_reference

NAME = "cuda_ipc"

_EXPORT_BYTES = 4096  # at the front of the segment, describing how to reach the ring; the slots' words follow


class DeviceRegion(Protocol):
    """A run of device memory, our own or another process's. Freed, or closed, with its last reference."""

    @property
    def num_bytes(self) -> int:
        """Size of the region."""

    def part(self, offset: int, num_bytes: int) -> DeviceBytes:
        """Part of the region; keeps all of it alive."""


class DeviceMemory(Protocol):
    """The memory of the device that this process computes on."""

    def allocate(self, num_bytes: int) -> tuple[DeviceRegion, bytes]:
        """A new region, and what `open` needs in another process. Raises Unavailable if it cannot be had or shared."""

    def open(self, exported: bytes) -> DeviceRegion:
        """Another process's region. Raises Incompatible or Unavailable with the reason. Blocks for a moment."""


class CudaIpcOutlet:
    """Owns one link's ring."""

    name = NAME

    def __init__(self, memory: DeviceMemory | None, num_slots: int, slot_bytes: int) -> None:
        """Raises Incompatible, Unavailable or OSError if there is no such memory."""
        if memory is None:
            raise Incompatible("cuda_ipc needs an engine on one GPU that copies with the triton kernels")
        self._ring, exported = memory.allocate(num_slots * slot_bytes)
        assert len(exported) <= _EXPORT_BYTES
        self._segment = SharedSegment(_EXPORT_BYTES + num_slots * USE_BYTES)
        self._segment.memory[: len(exported)] = exported
        self._slot_bytes = slot_bytes
        self._free = FreeSlots(num_slots, slot_bytes, self._segment.memory, _EXPORT_BYTES)

    def offer(self) -> Offer:
        """The host, and the segment that says how to reach the ring."""
        return Offer(NAME, f"{host_id()}/{self._segment.name}".encode())

    def charge_bytes(self, num_bytes: int) -> int:
        """Size of a whole slot."""
        return self._slot_bytes

    def room(self, num_bytes: int) -> StagingBuffer:
        """A slot, which only the engine can fill."""
        reference = self._free.take(num_bytes)
        device = self._ring.part(reference.offset, num_bytes)
        nothing, encoded = memoryview(bytearray()), reference.encoded()
        return StagingBuffer(nothing, self._slot_bytes, reference.offset, encoded, weakref.ref(device), device)

    def hold(self, payload: memoryview) -> StagingBuffer:
        """Places a payload of host memory inside its message."""
        return StagingBuffer(payload, self._slot_bytes, bytearray())

    def reuse(self, buffer: StagingBuffer) -> None:
        """Frees the slot, which is used next."""
        if isinstance(buffer.memory, int):
            self._free.give_back(buffer.memory)

    def close(self) -> None:
        """Makes receivers release the ring, which ends with the link."""
        self._segment.close()


class _OpenedRing:
    """A sender's ring as seen by one transfer."""

    def __init__(self, ring: DeviceRegion, segment: Source) -> None:
        self._ring = ring
        self._segment = segment  # while it is alive, the inlet keeps the ring for the sender's next transfer

    async def fetch(self, reference: bytes, num_bytes: int) -> DeviceBytes:
        """The slot."""
        place = decode_reference(reference)
        place.check_within(num_bytes, self._ring.num_bytes)
        return self._ring.part(place.offset, num_bytes)

    def is_intact(self, reference: bytes) -> bool:
        """Checks the slot's word in host memory: by then the device has finished reading."""
        return self._segment.is_intact(reference)

    def close(self) -> None:
        """Keeps the ring for the sender's next transfer."""


class CudaIpcInlet:
    """Owns the rings of all senders, by the segment that described each; a ring goes when its segment is dropped."""

    name = NAME

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._segments = SharedMemoryInlet()
        self._rings: WeakKeyDictionary[Source, DeviceRegion] = WeakKeyDictionary()
        self._opening = asyncio.Lock()  # a process may open a ring only once

    async def join(self, parameters: bytes) -> _OpenedRing:
        """Opens the sender's ring, or reuses an open one."""
        segment = await self._segments.join(parameters)
        async with self._opening:
            ring = self._rings.get(segment)
            if ring is None:
                exported = await segment.fetch(Reference(0).encoded(), _EXPORT_BYTES)
                ring = await asyncio.to_thread(self._memory.open, bytes(exported).rstrip(b"\0"))
                self._rings[segment] = ring
        return _OpenedRing(ring, segment)

    def close(self) -> None:
        """Closes every ring that no transfer uses."""
        self._segments.close()
