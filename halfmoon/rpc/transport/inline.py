"""The transport `grpc`: payloads follow their headers in the messages of the stream."""

from __future__ import annotations

from halfmoon.kv.negotiation import INLINE, Offer
from halfmoon.rpc.transport.protocol import StagingBuffer, lend

_MAX_KEPT = 4


class InlineOutlet:
    """Owns a few buffers to gather payloads in: touching new memory costs more than the copy."""

    name = INLINE

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def offer(self) -> Offer:
        """Nothing has to be joined."""
        return Offer(INLINE)

    def charge_bytes(self, num_bytes: int) -> int:
        """Just its size."""
        return num_bytes

    def room(self, num_bytes: int) -> StagingBuffer:
        """A buffer of this process; the message will hold a copy."""
        for memory in self._kept:
            if len(memory) >= num_bytes:
                self._kept.remove(memory)
                break
        else:
            memory = bytearray(num_bytes)
        view, lent = lend(memory, 0, num_bytes)
        return StagingBuffer(view, num_bytes, memory, lent=lent)

    def hold(self, payload: memoryview) -> StagingBuffer:
        """The caller's own memory."""
        return StagingBuffer(payload, payload.nbytes, bytearray())

    def reuse(self, buffer: StagingBuffer) -> None:
        """Its memory is for the next payload."""
        assert isinstance(buffer.memory, bytearray)
        if buffer.memory and len(self._kept) < _MAX_KEPT:
            self._kept.append(buffer.memory)

    def close(self) -> None:
        """Nothing is held."""
        self._kept.clear()
