"""Notifies listeners which KV of a prompt can be read while the rest is computed. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from halfmoon.engine.scheduling.schedule import ScheduledSequence
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.kv.frame import MAX_PAYLOAD_BYTES
from halfmoon.kv.frame_plan import Written
from halfmoon.kv.kv_layout import KVLayout

OnKV = Callable[[Written | None], None]  # None: the request and its KV are gone


class LayerWatch(NamedTuple):
    """A listener to a step's progress. `notify(n)`: K and V of the first `n` layers are in memory."""

    every: int  # layers between calls; the last `every` layers are reported where 2**n layers are left, and at the end
    notify: Callable[[int], None]


class KVWatch:
    """Owns the listeners by request, and each sequence's `written`. Engine thread, except for a step's `notify`.

    News may be out of date when it arrives: a preemption takes KV back without notice. A reader that then asks for the
    KV is refused (`NotWritten`), and is notified again once it is computed again.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._listeners: dict[str, OnKV] = {}
        self._layers_at_once: dict[str, int] = {}  # of those who want to hear more often than frames are worth

    def add(self, request_id: str, on_kv: OnKV, layers_at_once: int = 0) -> None:
        """Notifies `on_kv` of the request's KV from now on, on the engine's or its device's thread.

        layers_at_once: of a step, between two notices; 0: as many as fill a frame.
        """
        self._listeners[request_id] = on_kv
        if layers_at_once:
            self._layers_at_once[request_id] = layers_at_once

    def begin(self, scheduled: Iterable[ScheduledSequence]) -> LayerWatch | None:
        """Begins a step: tokens from the prefix cache can be read at once. None when no listener wants layers."""
        if not self._listeners:
            return None
        watched = []
        for item in scheduled:
            sequence = item.sequence
            if sequence.request_id in self._listeners:
                start = sequence.num_computed
                watched.append((sequence, start, item.start + item.num_tokens))
                if start > 0 and not sequence.has_begun:
                    self._notify(sequence, Written(start))
        if not watched:
            return None

        def notify(num_layers: int) -> None:
            for sequence, start, end in watched:
                self._notify(sequence, Written(start, end, num_layers))

        wanted = [self._layers_at_once.get(sequence.request_id, self._layout.num_layers) for sequence, _, _ in watched]
        return LayerWatch(min(self._frame_layers(max(end - start for _, start, end in watched)), *wanted), notify)

    def advance(self, sequence: Sequence) -> None:
        """Ends a step: `num_computed` tokens are written in all layers."""
        if sequence.request.prefill_only:
            self._notify(sequence, Written(sequence.num_computed))

    def taken_back(self, sequence: Sequence) -> None:
        """Notes that a step of the sequence was given up: what it wrote will be written again."""
        with sequence.kv_lock:  # lets a copy in progress finish
            sequence.written = Written()
        self._notify(sequence, Written(sequence.num_computed))

    def loaded(self, sequence: Sequence) -> None:
        """Reports that some of the sequence's blocks were loaded."""
        self._notify(sequence, Written(sequence.num_computed))

    def forget(self, request_id: str) -> None:
        """Drops the request's listener silently."""
        self._listeners.pop(request_id, None)
        self._layers_at_once.pop(request_id, None)

    def remove(self, request_id: str) -> None:
        """Notifies the listener, for the last time, that the request is gone."""
        on_kv = self._listeners.get(request_id)
        self.forget(request_id)
        if on_kv is not None:
            on_kv(None)

    def _notify(self, sequence: Sequence, written: Written) -> None:
        if sequence.restore is not None:
            block_tokens = self._layout.block_tokens
            runs = sequence.restore.runs(sequence.num_computed // block_tokens)
            written = written._replace(loaded=tuple((a * block_tokens, b * block_tokens) for a, b in runs))
        if sequence.choice is not None:
            written = Written()  # what is handed over is not chosen yet
        elif sequence.not_handed_over:
            written = written.without(sequence.not_handed_over, self._layout.block_tokens)
        sequence.written = written
        on_kv = self._listeners.get(sequence.request_id)
        if on_kv is not None:
            on_kv(written)

    def _frame_layers(self, num_tokens: int) -> int:
        """Number of layers of a chunk that fill a frame."""
        return max(1, MAX_PAYLOAD_BYTES // (self._layout.token_layer_bytes * num_tokens))
