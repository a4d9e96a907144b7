"""Load shedding: the lowest classes are refused, one by one, while a class above them misses its targets."""

from __future__ import annotations

from collections.abc import Iterable

_SHED_S = 5.0  # how long a class is shed after the latest refusal above it
_RELIEF_S = 1.0  # time for shedding one class to take effect before the next is shed


class Shedding:
    """Owns the priority from which on classes are shed, and until when."""

    def __init__(self) -> None:
        self._from: int | None = None
        self._since_s = self._until_s = 0.0

    def shed(self, priority: int, priorities: Iterable[int], now_s: float) -> None:
        """Notes a refusal of a class of `priority`: sheds the lowest class below it, or one more than before."""
        lower = sorted({below for below in priorities if below > priority}, reverse=True)
        if self._from is None or now_s >= self._until_s:
            self._from, self._since_s = (lower[0] if lower else None), now_s
        elif now_s - self._since_s >= _RELIEF_S:
            further = [below for below in lower if below < self._from]
            if further:
                self._from, self._since_s = further[0], now_s
        self._until_s = now_s + _SHED_S

    def left_s(self, priority: int, now_s: float) -> float:
        """How much longer a class of `priority` is shed; 0 if it is not."""
        if self._from is None or priority < self._from:
            return 0.0
        return max(self._until_s - now_s, 0.0)
