"""The clock of a simulation: what happens when."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class EventQueue:
    """Owns the time and the events to come, the next one first: (when, number, handler, arguments).

    Equal times keep their order.
    """

    __slots__ = ("_numbers", "now_s", "pending")

    def __init__(self) -> None:
        self.pending: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self.now_s = 0.0

    def at(self, at_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        """`handler` is called then."""
        heapq.heappush(self.pending, (at_s, next(self._numbers), handler, arguments))

    def run_next(self) -> None:
        """It is the time of the next one, which happens."""
        self.now_s, _, handler, arguments = heapq.heappop(self.pending)
        handler(*arguments)
