"""Where a step waits for KV that arrives layer by layer while the step computes. No torch, no asyncio."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable


class LayerLate(Exception):
    """A layer of awaited KV did not arrive in time. The step that needs it is given up and loses nothing else."""


class LayerGate:
    """Owns how many leading layers of some awaited blocks are in memory. Any thread.

    All waits together take at most `patience_s`: a step holds up whatever comes after it.
    """

    asked: None = None  # every layer passes it

    def __init__(self, blocks: Iterable[int], num_layers: int, patience_s: float) -> None:
        """blocks: of the prompt, that arrive here."""
        self.blocks = frozenset(blocks)
        self.waited_s = 0.0
        self._num_layers = num_layers
        self._patience_s = patience_s
        self._num_here = 0
        self._has_failed = False
        self._changed = threading.Condition()

    def arrived(self, num_layers: int) -> None:
        """Notes that the first `num_layers` layers of all the blocks are in memory and verified."""
        with self._changed:
            self._num_here = num_layers
            self._changed.notify_all()

    def fail(self) -> None:
        """Notes that no more layers will arrive. No effect once all are here."""
        with self._changed:
            self._has_failed |= self._num_here < self._num_layers
            self._changed.notify_all()

    @property
    def is_open(self) -> bool:
        """Whether a step may count on it."""
        return not self._has_failed

    def wait(self, layer: int) -> None:
        """Returns when this layer is in memory. Raises LayerLate if it takes too long, or will not arrive."""
        if self._num_here > layer:
            return
        began_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_failed or self._num_here > layer, max(0.0, self._patience_s - self.waited_s)
            )
            self.waited_s += time.monotonic() - began_s
            if self._num_here <= layer:
                self._has_failed = True
                raise LayerLate
