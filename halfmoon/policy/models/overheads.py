"""What a request takes beside the work that the latency models know: HTTP, calls, opening a transfer, the hand-over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

_WINDOW = 64  # latest requests
_MIN_SAMPLES = 3
_REFRESH = 4  # samples after which the median is computed again
_FIRST_GAPS = 4  # a decode worker that takes KV over is slow for so many steps


def handover_s(gaps_s: Sequence[float]) -> float | None:
    """What the first gaps between a request's tokens took more than as many of the next ones; None where there are too
    few to tell."""
    first, others = gaps_s[:_FIRST_GAPS], gaps_s[_FIRST_GAPS:]
    return float(sum(first) - len(first) * median(others)) if len(others) >= _FIRST_GAPS else None


class Overhead:
    """Owns the latest measurements of one such time. Their median is what the next request is taken to have."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_WINDOW)
        self._num_new = 0
        self._median_s = 0.0

    @property
    def seconds(self) -> float:
        """0 while hardly anything was measured."""
        return self._median_s

    def add(self, measured_s: float) -> None:
        """One request's; clocks of several hosts may make it negative, which it is not."""
        self._samples.append(max(measured_s, 0.0))
        self._num_new += 1
        if len(self._samples) >= _MIN_SAMPLES and (self._num_new >= _REFRESH or len(self._samples) <= _REFRESH):
            self._num_new = 0
            self._median_s = float(np.median(self._samples))
