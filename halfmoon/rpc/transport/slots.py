"""Memory that both ends of a link can reach, cut into equal slots of one payload each.

A slot may be refilled while a receiver still reads it: its transfer has died, and its receiver does not know yet. So
each slot has a word that counts its uses, and a reference names the use that it means. A receiver that finds the same
count before and after reading has read that payload and no other (a seqlock whose writer never waits).
"""

from __future__ import annotations

import struct
from threading import Lock
from typing import NamedTuple

from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_layout import KVBytes
from halfmoon.rpc.transport.protocol import StagingBuffer, lend

USE_BYTES = 8  # size of a slot's word

_REFERENCE = struct.Struct("<QQQ")
_USE = struct.Struct("<Q")


class Reference(NamedTuple):
    """Locates a payload for the receiver."""

    offset: int  # where the payload begins
    use_at: int = 0  # offset of its slot's word, in the memory that holds the words
    use: int = 0  # value of the word as long as the slot holds this payload

    def encoded(self) -> bytes:
        """The reference as encoded in a frame."""
        return _REFERENCE.pack(*self)

    def check_within(self, num_bytes: int, memory_bytes: int) -> None:
        """Raises InvalidRequest unless the whole payload lies in the sender's memory."""
        if self.offset + num_bytes > memory_bytes:
            span = f"{self.offset}..{self.offset + num_bytes}"
            raise InvalidRequest(f"a frame's payload at {span} is outside the shared memory")

    def is_current(self, words: KVBytes) -> bool:
        """Whether the slot has not been reused. Raises InvalidRequest if it has no word in `words`."""
        if self.use_at + USE_BYTES > memoryview(words).nbytes:
            raise InvalidRequest("a frame's reference names a count of uses outside the shared memory")
        use: int = _USE.unpack_from(words, self.use_at)[0]
        return use == self.use


def decode_reference(reference: bytes) -> Reference:
    """Parses a frame's reference. Raises InvalidRequest if it is malformed."""
    if len(reference) != _REFERENCE.size:
        raise InvalidRequest("a frame's reference into shared memory must be an offset, and a use and its place")
    return Reference(*_REFERENCE.unpack(reference))


class FreeSlots:
    """Owns which slots of the sender's memory are free, by their offsets, and the words that count their uses.

    The most recently freed slot is reused first: touching a page for the first time costs more than copying it, and a
    link that is not behind stays within a few slots, warm in the cache.
    """

    def __init__(self, num_slots: int, slot_bytes: int, memory: memoryview, words_at: int) -> None:
        """The words are at `words_at` in `memory`, which the receiver can read."""
        self._slot_bytes = slot_bytes
        self._memory = memory
        self._words_at = words_at
        self._uses = [0] * num_slots
        self._free = [slot * slot_bytes for slot in reversed(range(num_slots))]  # the next one is last
        self._fence = Lock()

    def take(self, num_bytes: int) -> Reference:
        """A free slot, whose earlier use ends here; the window guarantees that there is one."""
        assert num_bytes <= self._slot_bytes
        offset = self._free.pop()
        slot = offset // self._slot_bytes
        self._uses[slot] += 1
        use_at = self._words_at + slot * USE_BYTES
        _USE.pack_into(self._memory, use_at, self._uses[slot])
        for _ in range(2):  # ARM may show a reader the payload first, unless a lock is released and then acquired
            with self._fence:
                pass
        return Reference(offset, use_at, self._uses[slot])

    def give_back(self, offset: int) -> None:
        """Frees the slot, which is used next."""
        assert offset not in self._free
        self._free.append(offset)


class Slots:
    """Owns slots in memory of this process, as the places of an `Outlet`; the words lie behind them."""

    def __init__(self, memory: memoryview, num_slots: int, slot_bytes: int) -> None:
        """`memory` has `slots_bytes`."""
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._free = FreeSlots(num_slots, slot_bytes, memory, num_slots * slot_bytes)

    def charge_bytes(self, num_bytes: int) -> int:
        """Size of a whole slot."""
        return self._slot_bytes

    def room(self, num_bytes: int) -> StagingBuffer:
        """A free slot; the window guarantees that there is one."""
        reference = self._free.take(num_bytes)
        view, lent = lend(self._memory, reference.offset, num_bytes)
        return StagingBuffer(view, self._slot_bytes, reference.offset, reference.encoded(), lent)

    def hold(self, payload: memoryview) -> StagingBuffer:
        """A slot with a copy of the payload."""
        buffer = self.room(payload.nbytes)
        buffer.view[:] = payload
        return buffer

    def reuse(self, buffer: StagingBuffer) -> None:
        """Frees the slot, which is used next."""
        assert isinstance(buffer.memory, int)
        self._free.give_back(buffer.memory)


def slots_bytes(num_slots: int, slot_bytes: int) -> int:
    """Memory that `num_slots` slots take with their words."""
    return num_slots * (slot_bytes + USE_BYTES)
