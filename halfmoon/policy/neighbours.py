"""The workers on one host, from now on: who of them will be busy, and how long work takes beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

Span = tuple[float, float]  # from, until


class Decoding(NamedTuple):
    """What comes after a prompt."""

    row: int  # of the cluster view: who does it
    seconds: float


class Neighbours:
    """Owns when the workers beside one will be busy, as far as that is foreseen."""

    def __init__(self, spans: Mapping[int, Iterable[Span]]) -> None:
        """By the neighbour's row of the cluster view."""
        self._spans = {row: list(of_row) for row, of_row in spans.items()}

    def decode(self, decoding: Decoding | None, now_s: float) -> None:
        """A prompt is computed, and decoded from now on; who is no neighbour does not matter."""
        if decoding is not None and decoding.row in self._spans:
            self._spans[decoding.row].append((now_s, now_s + decoding.seconds))

    def after(self, work_s: float, begin_s: float, contention: float) -> float:
        """When work that takes `work_s` alone is done."""
        now_s = begin_s
        while contention > 0:
            busy, until_s = self._next(now_s)
            slowdown = 1 + contention * busy
            if now_s + work_s * slowdown <= until_s:
                return now_s + work_s * slowdown
            work_s -= (until_s - now_s) / slowdown
            now_s = until_s
        return now_s + work_s

    def _next(self, now_s: float) -> tuple[int, float]:
        """How many are busy, and until when that is so."""
        busy, until_s = 0, math.inf
        for spans in self._spans.values():
            is_busy = False
            for begin_s, end_s in spans:
                if begin_s <= now_s < end_s:
                    is_busy = True
                    until_s = min(until_s, end_s)
                elif now_s < begin_s:
                    until_s = min(until_s, begin_s)
            busy += is_busy
        return busy, until_s
