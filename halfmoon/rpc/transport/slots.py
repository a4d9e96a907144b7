"""Memory that both ends of a link can reach, cut into equal slots, one a payload."""

from __future__ import annotations

import struct

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.transport.protocol import StagingBuffer, lend

_OFFSET = struct.Struct("<Q")  # a reference: where in the memory the payload begins


class Slots:
    """Owns which slots of the sender's memory are free.

    The last one that came free is the first to be used again: touching a page for the first time costs more than
    copying it, and a link that is not behind stays within a few slots, warm in the cache.
    """

    def __init__(self, memory: memoryview, slot_bytes: int) -> None:
        self._memory = memory
        self.slot_bytes = slot_bytes
        num_slots = memory.nbytes // slot_bytes
        self._free = [slot * slot_bytes for slot in reversed(range(num_slots))]  # offsets, the next one last

    def room(self, num_bytes: int) -> StagingBuffer:
        """A free slot; the window says that there is one."""
        assert num_bytes <= self.slot_bytes
        offset = self._free.pop()
        view, lent = lend(self._memory, offset, num_bytes)
        return StagingBuffer(view, self.slot_bytes, offset, _OFFSET.pack(offset), lent)

    def hold(self, payload: memoryview) -> StagingBuffer:
        """A slot with a copy."""
        buffer = self.room(payload.nbytes)
        buffer.view[:] = payload
        return buffer

    def reuse(self, buffer: StagingBuffer) -> None:
        """The slot is the next one to be used."""
        assert isinstance(buffer.memory, int)
        assert buffer.memory not in self._free
        self._free.append(buffer.memory)


def offset_of(reference: bytes, num_bytes: int, memory_bytes: int) -> int:
    """Where the payload of a frame begins. Raises InvalidRequest unless all of it lies in the sender's memory."""
    if len(reference) != _OFFSET.size:
        raise InvalidRequest("a frame's reference into shared memory must be an offset")
    offset: int = _OFFSET.unpack(reference)[0]
    if offset + num_bytes > memory_bytes:
        raise InvalidRequest(f"a frame's payload at {offset}..{offset + num_bytes} is outside the shared memory")
    return offset
