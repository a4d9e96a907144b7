"""Overheads that the latency models do not cover: HTTP, RPCs, opening a transfer, the hand-over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

_WINDOW = 64  # latest requests
_MIN_SAMPLES = 3
_REFRESH = 4  # samples after which the median is computed again
_FIRST_GAPS = 4  # decode steps slowed down by the hand-over of KV


def handover_s(gaps_s: Sequence[float]) -> float | None:
    """How much longer the first gaps between a request's tokens took than later ones; None if there are too few.

    Tokens that came together, with gaps of 0 behind the first one's, share its gap.
    """
    first = gaps_s[:_FIRST_GAPS]
    others = [gap_s for gap_s in shared_gaps(gaps_s[_FIRST_GAPS:]) if gap_s > 0.0]  # of whole groups
    return float(sum(first) - len(first) * median(others)) if len(others) >= _FIRST_GAPS else None


def shared_gaps(gaps_s: Sequence[float]) -> list[float]:
    """Each token's gap where tokens that came together share theirs; 0 for those that came with the first token."""
    starts = [*(at for at, gap_s in enumerate(gaps_s) if gap_s > 0.0), len(gaps_s)]
    groups = [(gaps_s[start], end - start) for start, end in pairwise(starts)]
    return [*gaps_s[: starts[0]], *(gap_s / num for gap_s, num in groups for _ in range(num))]


class Overhead:
    """Owns the latest measurements of one overhead, and predicts their median."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_WINDOW)
        self._num_new = 0
        self._median_s = 0.0

    @property
    def seconds(self) -> float:
        """The prediction; 0 while there are too few measurements."""
        return self._median_s

    def add(self, measured_s: float) -> None:
        """Adds the overhead of a request. A negative one, from clocks that differ between hosts, counts as 0."""
        self._samples.append(max(measured_s, 0.0))
        self._num_new += 1
        if len(self._samples) >= _MIN_SAMPLES and (self._num_new >= _REFRESH or len(self._samples) <= _REFRESH):
            self._num_new = 0
            self._median_s = median(self._samples)
