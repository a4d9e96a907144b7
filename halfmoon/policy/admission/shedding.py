"""Which classes wait outside while one above them cannot be served: the lowest first, then the next ones."""

from __future__ import annotations

from collections.abc import Iterable

_SHED_S = 5.0  # how long, from the last refusal above
_RELIEF_S = 1.0  # what one more class outside is given to show


class Shedding:
    """Owns from which priority on classes are outside, and until when."""

    def __init__(self) -> None:
        self._from: int | None = None
        self._since_s = self._until_s = 0.0

    def shed(self, priority: int, priorities: Iterable[int], now_s: float) -> None:
        """A class of `priority` was refused: of those below it the lowest goes outside, or one more than there are."""
        lower = sorted({one for one in priorities if one > priority}, reverse=True)
        if self._from is None or now_s >= self._until_s:
            self._from, self._since_s = (lower[0] if lower else None), now_s
        elif now_s - self._since_s >= _RELIEF_S:
            further = [one for one in lower if one < self._from]
            if further:
                self._from, self._since_s = further[0], now_s
        self._until_s = now_s + _SHED_S

    def left_s(self, priority: int, now_s: float) -> float:
        """How long a class of `priority` stays outside; 0 when it is not."""
        if self._from is None or priority < self._from:
            return 0.0
        return max(self._until_s - now_s, 0.0)
