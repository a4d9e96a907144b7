"""Interference: how much slower a worker computes next to busy workers of its host, which share cores and memory.

    seconds = seconds alone * (1 + contention * number of busy colocated workers)

The time alone changes with the machine from minute to minute. Contention does not, and so is remembered longer. It is 0
for workers that share nothing, and at the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_PRIOR = 0.5  # weight of the start value, in steps with interference against one alone
_MOST = 8.0  # highest contention
_SURPRISE = math.log(2.0)  # a step is clipped to between half and twice the expected time


class LearnedContention:
    """Owns the contention of one worker: the slope of log(measured / predicted) over the number of busy workers.

    Both variables count relative to their means over the latest steps. A machine that becomes slower, or a wrong model,
    is therefore not mistaken for interference. A worker whose colocated workers are always or never busy learns none.
    """

    def __init__(self, forgetting: float, mean_forgetting: float) -> None:
        """`forgetting`: decay of a step's weight per later step that differs as much from the mean.

        `mean_forgetting`: decay of its weight in the means per later step.
        """
        self._forgetting = forgetting
        self._mean_forgetting = mean_forgetting
        self._num = 0.0  # effective number of steps in the means
        self._mean_share = self._mean_log = 0.0
        self._squares = self._products = 0.0  # of the differences from the means
        self._slope = 0.0

    @property
    def factor(self) -> float:
        """What one busy colocated worker adds, as a share of the time alone."""
        return min(math.expm1(self._slope), _MOST)

    def observe(self, ratios: Sequence[float], num_busy: Sequence[float]) -> None:
        """Learns from steps: measured time over that predicted alone, above 0, and the number of busy workers."""
        for ratio, busy in zip(ratios, num_busy, strict=True):
            share, log_slowdown = min(busy, 1.0), math.log1p(self.factor)
            log_ratio = (
                math.log(ratio / (1 + self.factor * busy)) + log_slowdown * share
            )  # scaled to at most one busy worker
            if self._num:
                expected = self._mean_log + log_slowdown * (share - self._mean_share)
                log_ratio = min(max(log_ratio, expected - _SURPRISE), expected + _SURPRISE)
                self._fit(share - self._mean_share, log_ratio - self._mean_log)
            self._num = self._num * self._mean_forgetting + 1
            self._mean_share += (share - self._mean_share) / self._num
            self._mean_log += (log_ratio - self._mean_log) / self._num

    def rescale(self, times: float) -> None:
        """Adjusts to predictions that from now on are `times` what they were."""
        self._mean_log -= math.log(times)

    def _fit(self, share: float, log_ratio: float) -> None:
        kept = self._forgetting ** abs(share)
        self._squares = self._squares * kept + share**2
        self._products = self._products * kept + share * log_ratio
        self._slope = max(self._products / (self._squares + _PRIOR), 0.0)
