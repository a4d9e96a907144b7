"""Memory that both ends of a link can reach, cut into equal slots, one a payload."""

from __future__ import annotations

import struct

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.transport.protocol import StagingBuffer, lend

_OFFSET = struct.Struct("<Q")  # a reference: where in the memory the payload begins


class FreeSlots:
    """Owns which slots of the sender's memory are free, by their offsets.

    The last one that came free is the first to be used again: touching a page for the first time costs more than
    copying it, and a link that is not behind stays within a few slots, warm in the cache.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._free = [slot * slot_bytes for slot in reversed(range(num_slots))]  # the next one last

    def take(self, num_bytes: int) -> int:
        """Where a free slot begins; the window says that there is one."""
        assert num_bytes <= self._slot_bytes
        return self._free.pop()

    def give_back(self, offset: int) -> None:
        """The slot is the next one to be used."""
        assert offset not in self._free
        self._free.append(offset)


class Slots:
    """Owns memory of this process, and its slots."""

    def __init__(self, memory: memoryview, slot_bytes: int) -> None:
        self._memory = memory
        self.slot_bytes = slot_bytes
        self._free = FreeSlots(memory.nbytes // slot_bytes, slot_bytes)

    def room(self, num_bytes: int) -> StagingBuffer:
        """A free slot; the window says that there is one."""
        offset = self._free.take(num_bytes)
        view, lent = lend(self._memory, offset, num_bytes)
        return StagingBuffer(view, self.slot_bytes, offset, reference_to(offset), lent)

    def hold(self, payload: memoryview) -> StagingBuffer:
        """A slot with a copy."""
        buffer = self.room(payload.nbytes)
        buffer.view[:] = payload
        return buffer

    def reuse(self, buffer: StagingBuffer) -> None:
        """The slot is the next one to be used."""
        assert isinstance(buffer.memory, int)
        self._free.give_back(buffer.memory)


def reference_to(offset: int) -> bytes:
    """What tells a receiver where in the memory a payload begins."""
    return _OFFSET.pack(offset)


def offset_of(reference: bytes, num_bytes: int, memory_bytes: int) -> int:
    """Where the payload of a frame begins. Raises InvalidRequest unless all of it lies in the sender's memory."""
    if len(reference) != _OFFSET.size:
        raise InvalidRequest("a frame's reference into shared memory must be an offset")
    offset: int = _OFFSET.unpack(reference)[0]
    if offset + num_bytes > memory_bytes:
        raise InvalidRequest(f"a frame's payload at {offset}..{offset + num_bytes} is outside the shared memory")
    return offset
