"""Which slots of a table belong to one row of the cluster view."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


class RowSlots:
    """Owns the slots of one row."""

    def __init__(self) -> None:
        self._slots: list[int] = []  # ascending
        self._column: NDArray[np.int64] | None = None  # the same; None after a change

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def add(self, slot: int) -> None:
        """Adds a slot."""
        insort(self._slots, slot)
        self._column = None

    def remove(self, slot: int) -> None:
        """Removes a slot."""
        del self._slots[bisect_left(self._slots, slot)]
        self._column = None

    @property
    def ascending(self) -> NDArray[np.int64]:
        """The slots in ascending order; read-only."""
        if self._column is None:
            self._column = np.array(self._slots, dtype=np.int64)
        return self._column
