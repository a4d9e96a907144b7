"""K and V of paused answers whose blocks others need: copied to host memory and back, bit by bit."""

from __future__ import annotations

from typing import NamedTuple

from halfmoon.engine.kv_memory.kv_access import KVMemory
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.kv.kv_layout import KVLayout, KVSlice


class _Copy(NamedTuple):
    num_tokens: int  # of the blocks that the sequence had not given back
    payload: memoryview


class HostCopies:
    """Owns the copies, by request: at most `max_bytes` in all. Engine thread only."""

    def __init__(self, memory: KVMemory, layout: KVLayout, max_bytes: int) -> None:
        self._memory = memory
        self._layout = layout
        self._max_bytes = max_bytes
        self._copies: dict[str, _Copy] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.payload.nbytes for copy in self._copies.values())

    def save(self, sequence: Sequence) -> bool:
        """See `PausedKV.save`."""
        num_tokens = sequence.num_computed - len(sequence.dropped) * self._layout.block_tokens
        num_blocks = -(-num_tokens // self._layout.block_tokens)
        if self.num_bytes + num_blocks * self._layout.block_bytes > self._max_bytes:
            return False
        payload = self._memory.read(sequence.kept_blocks, KVSlice(0, self._layout.num_layers, 0, num_tokens))
        self._copies[sequence.request_id] = _Copy(num_tokens, payload)
        return True

    def load(self, sequence: Sequence) -> None:
        """See `PausedKV.load`."""
        num_tokens, payload = self._copies.pop(sequence.request_id)
        self._memory.write(sequence.kept_blocks, KVSlice(0, self._layout.num_layers, 0, num_tokens), payload)

    def forget(self, sequence: Sequence) -> None:
        """See `PausedKV.forget`."""
        self._copies.pop(sequence.request_id, None)
