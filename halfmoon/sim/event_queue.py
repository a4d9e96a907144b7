"""The clock and the future events of a simulation."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class EventQueue:
    """Owns the time and the future events, the next one first: (time, number, handler, arguments).

    Events of equal time keep their order.
    """

    __slots__ = ("_numbers", "now_s", "pending")

    def __init__(self) -> None:
        self.pending: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self.now_s = 0.0

    def at(self, at_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        """Calls `handler` at `at_s`."""
        heapq.heappush(self.pending, (at_s, next(self._numbers), handler, arguments))

    def run_next(self) -> None:
        """Moves the clock to the next event and handles it."""
        self.now_s, _, handler, arguments = heapq.heappop(self.pending)
        handler(*arguments)
