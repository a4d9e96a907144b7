"""The transport `shm`: payloads in memory that sender and receiver share, on one host.

A link has one segment of slots, reused by successive transfers. A slot is rewritten only after its frame was credited,
or after its transfer died: a receiver that still reads it then notices and rejects what it has read (`slots.py`). A
slot that was torn or overwritten otherwise fails its frame's digest, which covers the payload here, too: xxh3 costs a
third of the copy.
"""

from __future__ import annotations

import asyncio
import socket

from halfmoon.errors import Incompatible, Unavailable
from halfmoon.kv.kv_layout import KVBytes
from halfmoon.kv.negotiation import Offer
from halfmoon.rpc.transport.memfd import SharedSegment, host_id, receive_segment
from halfmoon.rpc.transport.slots import Slots, decode_reference, slots_bytes

NAME = "shm"


class SharedMemoryOutlet(Slots):
    """Owns one link's segment."""

    name = NAME

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        """Raises OSError if there is no such memory."""
        self._segment = SharedSegment(slots_bytes(num_slots, slot_bytes))
        super().__init__(self._segment.memory, num_slots, slot_bytes)

    def offer(self) -> Offer:
        """The host, and where to get the segment's descriptor."""
        return Offer(NAME, f"{host_id()}/{self._segment.name}".encode())

    def close(self) -> None:
        """Releases the segment."""
        self._segment.close()


class _MappedSegment:
    """A sender's segment as its receiver sees it."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory  # read-only

    async def fetch(self, reference: bytes, num_bytes: int) -> KVBytes:
        """A view of the slot."""
        place = decode_reference(reference)
        place.check_within(num_bytes, self._memory.nbytes)
        return self._memory[place.offset : place.offset + num_bytes]

    def is_intact(self, reference: bytes) -> bool:
        """Checks the slot's word."""
        return decode_reference(reference).is_current(self._memory)

    def close(self) -> None:
        """Keeps the segment for the sender's next transfer."""


class SharedMemoryInlet:
    """Owns the segments of all senders; each is dropped when its sender is gone."""

    name = NAME

    def __init__(self) -> None:
        self._segments: dict[str, tuple[_MappedSegment, socket.socket]] = {}

    async def join(self, parameters: bytes) -> _MappedSegment:
        """Maps the segment, or reuses a mapped one."""
        host, _, name = parameters.decode(errors="replace").partition("/")
        if name not in self._segments:
            if host != host_id():
                raise Incompatible("the two ends are on different hosts or network namespaces")
            joining = asyncio.create_task(asyncio.to_thread(receive_segment, name))
            try:
                memory, connection = await asyncio.shield(joining)
            except asyncio.CancelledError:
                joining.add_done_callback(_leave)  # the thread cannot be stopped
                raise
            if name in self._segments:  # two transfers joined at once
                connection.close()
            else:
                self._segments[name] = _MappedSegment(memory), connection
                asyncio.get_running_loop().add_reader(connection, self._drop, name)
        if name not in self._segments:
            raise Unavailable("the sender of the shared memory has gone")
        return self._segments[name][0]

    def close(self) -> None:
        """Drops every segment; views in use keep its memory."""
        for name in list(self._segments):
            self._drop(name)

    def _drop(self, name: str) -> None:
        _, connection = self._segments.pop(name)
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()


def _leave(joining: asyncio.Task[tuple[memoryview, socket.socket]]) -> None:
    """Closes a segment that is no longer needed."""
    if not joining.cancelled() and joining.exception() is None:
        joining.result()[1].close()
