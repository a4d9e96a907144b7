"""When a sequence's KV may be copied, on any thread: in while it is reserved, out as far as it is written."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.errors import InvalidRequest, NotFound
from halfmoon.kv.device_bytes import KVPlace, KVSource
from halfmoon.kv.kv_layout import KVLayout, KVSlice


class NotWritten(NotFound):
    """KV that is not computed yet, or not again after a preemption."""


class KVMemory(Protocol):
    """Where KV lies: one device's arena, or all ranks' together."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""

    def read(self, blocks: SequenceOf[int], part: KVSlice, out: KVPlace | None = None) -> memoryview:
        """See `KVArena.read`."""

    def write(self, blocks: SequenceOf[int], part: KVSlice, payload: KVSource) -> None:
        """See `KVArena.write`."""


class KVAccess:
    """Copies under the sequence's lock: its blocks are not released meanwhile. Any thread. Knows no request ids.

    What is handed over is counted in its own tokens: those of `Sequence.handover_blocks`.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory

    def write(self, sequence: Sequence, part: KVSlice, payload: KVSource) -> None:
        """Implements `Engine.kv_write`: a reserved sequence is never stepped; others share its cached blocks."""
        with sequence.kv_lock:
            if sequence.state != "reserved":
                raise NotFound(f"request {sequence.request_id} is not reserved here")
            if part.token_start < sequence.num_cached:
                raise InvalidRequest(f"the first {sequence.num_cached} tokens are here already, and shared with others")
            self._memory.write(sequence.handover_blocks, part, payload)

    def load(
        self, sequence: Sequence, block: int, layout: KVLayout, payload: KVSource, layers: range | None = None
    ) -> None:
        """Implements `Engine.load_block`: no step computes a block behind the fence."""
        with sequence.kv_lock:
            if sequence.restore is None or not sequence.blocks or not sequence.restore.is_waited_for(block):
                raise NotFound(f"block {block} of request {sequence.request_id} is not, or no longer, to be loaded")
            start, layers = block * layout.block_tokens, layers or range(layout.num_layers)
            part = KVSlice(layers.start, layers.stop, start, layout.block_tokens)
            self._memory.write(sequence.blocks, part, payload)

    def read_block(self, block: int, layout: KVLayout, layers: range | None = None) -> memoryview:
        """Reads one block, or some layers of it, that is neither released nor written meanwhile."""
        layers = layers or range(layout.num_layers)
        return self._memory.read((block,), KVSlice(layers.start, layers.stop, 0, layout.block_tokens))

    def read(self, sequence: Sequence, part: KVSlice, out: KVPlace | None = None) -> memoryview:
        """Implements `Engine.kv_read`: what is written stays unchanged until the blocks are released."""
        with sequence.kv_lock:
            if sequence.state == "removed" or not sequence.request.prefill_only:
                raise NotFound(f"request {sequence.request_id} is not held here")
            num_written = sequence.written.num_tokens_of(part.layer_end - 1)
            if not sequence.written.has(part.layer_end - 1, part.token_start, part.token_end):
                if sequence.state == "held":
                    raise InvalidRequest(f"KV of {num_written} tokens is here, not {part.token_end}")
                raise NotWritten(f"KV of {num_written} tokens is written so far, not {part.token_end}")
            return self._memory.read(sequence.handover_blocks, part, out)
