"""Progress reports of prompts that load a part of their KV, and the changes that loading makes. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from halfmoon.engine.scheduling.layer_gate import LayerGate
from halfmoon.engine.scheduling.restore_order import OnProgress
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.errors import NotFound


class RestoreWatch:
    """Owns the listeners by request. A sequence's loaded blocks change under its lock. Engine thread only."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._listeners: dict[str, OnProgress] = {}

    def add(self, request_id: str, on_progress: OnProgress) -> None:
        """Reports the request's progress to `on_progress` from now on."""
        self._listeners[request_id] = on_progress

    def forget(self, request_id: str) -> None:
        """Drops the listener of a request that is gone."""
        self._listeners.pop(request_id, None)

    def tell(self, sequence: Sequence) -> None:
        """Reports a sequence's progress, if it has blocks."""
        on_progress = self._listeners.get(sequence.request_id) if sequence.blocks else None
        if on_progress is not None:
            on_progress(sequence.num_computed, sequence.num_loaded)

    def note_loaded(self, sequence: Sequence, loaded: SequenceOf[int], given_up: SequenceOf[int]) -> bool:
        """Implements `Engine.note_loaded`; returns False for a sequence that loads nothing."""
        if sequence.restore is None:
            return False
        with sequence.kv_lock:
            for block in loaded:
                sequence.restore.note_loaded(block)
            sequence.restore.give_up(given_up)
            sequence.skip_loaded(self._block_tokens)
        return True

    def arrive_by_layer(self, sequence: Sequence, gate: LayerGate | None) -> None:
        """Implements `Engine.arrive_by_layer`; None: whatever is awaited is awaited as a whole again."""
        if sequence.restore is not None:
            sequence.restore.gate = gate

    def move_fence(self, sequence: Sequence, fence: int) -> int:
        """Implements `Engine.move_fence`."""
        if sequence.restore is None:
            raise NotFound(f"request {sequence.request_id} does not wait for any KV to be loaded")
        with sequence.kv_lock:
            computed = -(-sequence.num_computed // self._block_tokens)
            sequence.restore.move_fence(max(fence, computed))
            return sequence.restore.fence
