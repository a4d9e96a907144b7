"""The transport `cuda_ipc`: payloads in device memory that sender and receiver share, on one host with GPUs.

A link has one ring of slots in the sender's device memory, used as those of `shm` are. The engines gather into a slot
and scatter out of it on their devices and wait until that has run: the sender before it announces the frame, the
receiver before it gives credit. So no stream or event is shared.

How the ring is reached is told through a small shared segment, not on the stream: only processes of the same user on
the same host get it, and when the sender goes, the receiver sees the connection close and lets go of the ring.

The digest of such a frame covers its header and its reference alone: a CPU cannot read the payload, and this memory is
neither a network nor a disk. Frames in a codec go by another transport, as codecs compute on the CPU.

Not run on a GPU yet. What happens to a scatter whose sender dies in its midst is CUDA's to say: the manual calls
memory that its owner freed undefined.
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

_EXPORT_BYTES = 4096  # at the front of the segment, which say how the ring is reached; the slots' words follow


class DeviceRegion(Protocol):
    """A run of device memory, one's own or another process's. Freed, or left, when nobody refers to it any more."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        ...

    def part(self, offset: int, num_bytes: int) -> DeviceBytes:
        """Some of it; keeps all of it."""
        ...


class DeviceMemory(Protocol):
    """The memory of the device that this process computes on."""

    def allocate(self, num_bytes: int) -> tuple[DeviceRegion, bytes]:
        """A new region, and what `open` needs in another process. Raises Unavailable when that cannot be had."""
        ...

    def open(self, exported: bytes) -> DeviceRegion:
        """Another process's region. Raises Incompatible or Unavailable with the reason. Blocks for a moment."""
        ...


class CudaIpcOutlet:
    """Owns one link's ring."""

    name = NAME

    def __init__(self, memory: DeviceMemory | None, num_slots: int, slot_bytes: int) -> None:
        """Raises Incompatible, Unavailable or OSError where there is no such memory."""
        if memory is None:
            raise Incompatible("cuda_ipc needs an engine on one GPU that copies with the triton kernels")
        self._ring, exported = memory.allocate(num_slots * slot_bytes)
        assert len(exported) <= _EXPORT_BYTES
        self._segment = SharedSegment(_EXPORT_BYTES + num_slots * USE_BYTES)
        self._segment.memory[: len(exported)] = exported
        self._slot_bytes = slot_bytes
        self._free = FreeSlots(num_slots, slot_bytes, self._segment.memory, _EXPORT_BYTES)

    def offer(self) -> Offer:
        """Which host, and where it is told how to reach the ring."""
        return Offer(NAME, f"{host_id()}/{self._segment.name}".encode())

    def charge_bytes(self, num_bytes: int) -> int:
        """A whole slot."""
        return self._slot_bytes

    def room(self, num_bytes: int) -> StagingBuffer:
        """A slot, which the engine can fill and nobody else."""
        reference = self._free.take(num_bytes)
        device = self._ring.part(reference.offset, num_bytes)
        nothing, encoded = memoryview(bytearray()), reference.encoded()
        return StagingBuffer(nothing, self._slot_bytes, reference.offset, encoded, weakref.ref(device), device)

    def hold(self, payload: memoryview) -> StagingBuffer:
        """What is in host memory travels inside its message."""
        return StagingBuffer(payload, self._slot_bytes, bytearray())

    def reuse(self, buffer: StagingBuffer) -> None:
        """The slot is the next one to be used."""
        if isinstance(buffer.memory, int):
            self._free.give_back(buffer.memory)

    def close(self) -> None:
        """Receivers let go of the ring; it goes with the link."""
        self._segment.close()


class _OpenedRing:
    """A sender's ring as one transfer sees it."""

    def __init__(self, ring: DeviceRegion, segment: Source) -> None:
        self._ring = ring
        self._segment = segment  # while it lives, the inlet keeps the ring for the sender's next transfer

    async def fetch(self, reference: bytes, num_bytes: int) -> DeviceBytes:
        """The slot."""
        place = decode_reference(reference)
        place.check_within(num_bytes, self._ring.num_bytes)
        return self._ring.part(place.offset, num_bytes)

    def is_intact(self, reference: bytes) -> bool:
        """Asks the slot's word, in host memory: the device is done with what was read when this is asked."""
        return self._segment.is_intact(reference)

    def close(self) -> None:
        """The ring is kept for the sender's next transfer."""


class CudaIpcInlet:
    """Owns the rings of all senders, by the segment that told of each; a ring goes when its segment is dropped."""

    name = NAME

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._segments = SharedMemoryInlet()
        self._rings: WeakKeyDictionary[Source, DeviceRegion] = WeakKeyDictionary()
        self._opening = asyncio.Lock()  # a process may open a ring once

    async def join(self, parameters: bytes) -> _OpenedRing:
        """Opens the sender's ring; a known one is used again."""
        segment = await self._segments.join(parameters)
        async with self._opening:
            ring = self._rings.get(segment)
            if ring is None:
                exported = await segment.fetch(Reference(0).encoded(), _EXPORT_BYTES)
                ring = await asyncio.to_thread(self._memory.open, bytes(exported).rstrip(b"\0"))
                self._rings[segment] = ring
        return _OpenedRing(ring, segment)

    def close(self) -> None:
        """Leaves every ring that no transfer uses."""
        self._segments.close()
