"""A clock of patience with others: while this process's event loop stands still, nobody else is late."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_USUAL_LAG_S = 0.05  # so late a busy loop comes back to its waits


class AwakeClock:
    """Owns how long the event loop has stood still, as far as somebody waited at the time. Event-loop thread only.

    A stopped loop reads no answer: how long an answer took is known no better than this clock says.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stopped_s = 0.0
        self._due_s: dict[object, float] = {}  # when each of those who wait should be back

    def now_s(self) -> float:
        """Seconds from an arbitrary origin, without the stops."""
        now_s = self._clock()
        return now_s - self._stopped_s - self._late_s(now_s)

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Encloses a wait of at most so long: whoever comes back much later was stopped."""
        wait = object()
        self._due_s[wait] = self._clock() + seconds + _USUAL_LAG_S
        try:
            yield
        finally:
            late_s = self._late_s(self._clock())
            del self._due_s[wait]
            self._stopped_s += late_s
            self._due_s = {other: due_s + late_s for other, due_s in self._due_s.items()}

    def _late_s(self, now_s: float) -> float:
        return max(0.0, now_s - min(self._due_s.values(), default=math.inf))
