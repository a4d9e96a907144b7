"""The transport `grpc`: payloads follow their headers in the messages of the stream."""

from __future__ import annotations

from halfmoon.kv.negotiation import INLINE, Offer
from halfmoon.rpc.transport.protocol import StagingBuffer, lend

_MAX_KEPT = 4


class InlineOutlet:
    """Owns a few buffers for gathering payloads: touching new memory costs more than the copy."""

    name = INLINE

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def offer(self) -> Offer:
        """An offer without parameters: there is nothing to join."""
        return Offer(INLINE)

    def charge_bytes(self, num_bytes: int) -> int:
        """Size of the payload."""
        return num_bytes

    def room(self, num_bytes: int) -> StagingBuffer:
        """A buffer in this process; the message will hold a copy."""
        for memory in self._kept:
            if len(memory) >= num_bytes:
                self._kept.remove(memory)
                break
        else:
            memory = bytearray(num_bytes)
        view, lent = lend(memory, 0, num_bytes)
        return StagingBuffer(view, num_bytes, memory, lent=lent)

    def hold(self, payload: memoryview) -> StagingBuffer:
        """The caller's own memory, not copied."""
        return StagingBuffer(payload, payload.nbytes, bytearray())

    def reuse(self, buffer: StagingBuffer) -> None:
        """Keeps the buffer's memory for the next payload."""
        assert isinstance(buffer.memory, bytearray)
        if buffer.memory and len(self._kept) < _MAX_KEPT:
            self._kept.append(buffer.memory)

    def close(self) -> None:
        """No-op: nothing is held."""
        self._kept.clear()
