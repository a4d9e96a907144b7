"""The workers on one host, from now on: who of them will be busy, and how long work takes beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

Span = tuple[float, float]  # from, until


class Decoding(NamedTuple):
    """What comes after a prompt."""

    row: int  # of the cluster view: who does it
    seconds: float


class Neighbours:
    """Owns when the workers beside one will be busy, as far as that is foreseen. Is asked in the order of time."""

    def __init__(self, spans: Mapping[int, Iterable[Span]]) -> None:
        """By the neighbour's row of the cluster view."""
        self._spans: dict[int, list[Span]] = {row: [] for row in spans}
        self._changes: list[tuple[float, int]] = []  # a heap: when, and how many more are busy then
        self._num_busy = 0  # after those that were taken out
        for row, of_row in spans.items():
            for span in of_row:
                self._add(row, span)

    def decode(self, decoding: Decoding | None, now_s: float) -> None:
        """A prompt is computed, and decoded from now on; who is no neighbour does not matter."""
        if decoding is not None and decoding.row in self._spans:
            self._add(decoding.row, (now_s, now_s + decoding.seconds))

    def after(self, work_s: float, begin_s: float, contention: float) -> float:
        """When work that takes `work_s` alone is done. It begins no sooner than what was asked for before."""
        now_s = begin_s
        while contention > 0:
            until_s = self._next_change(now_s)
            slowdown = 1 + contention * self._num_busy
            if now_s + work_s * slowdown <= until_s:
                return now_s + work_s * slowdown
            work_s -= (until_s - now_s) / slowdown
            now_s = until_s
        return now_s + work_s

    def _next_change(self, now_s: float) -> float:
        """Until when as many are busy as are now."""
        while self._changes and self._changes[0][0] <= now_s:
            self._num_busy += heappop(self._changes)[1]
        return self._changes[0][0] if self._changes else math.inf

    def _add(self, row: int, span: Span) -> None:
        """A worker that is busy already is not busier by more work."""
        new = [span]
        for begin_s, end_s in self._spans[row]:
            parts = [part for one in new for part in ((one[0], min(one[1], begin_s)), (max(one[0], end_s), one[1]))]
            new = [(from_s, until_s) for from_s, until_s in parts if from_s < until_s]
        self._spans[row].append(span)
        for from_s, until_s in new:
            if from_s < until_s:
                heappush(self._changes, (from_s, 1))
                heappush(self._changes, (until_s, -1))
