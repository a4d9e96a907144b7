"""How much slower a worker computes while its neighbours do: workers on one host share its cores and its memory.

    seconds = seconds alone * (1 + contention * busy neighbours)

What a step takes alone changes with the machine from minute to minute; by how much neighbours slow each other down does
not, so it is remembered longer. Workers that share nothing have a contention of 0, which is also the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_PRIOR = 0.5  # how much the start is worth: as a step beside neighbours against one alone
_MOST = 8.0  # times slower, beside one neighbour
_SURPRISE = math.log(2.0)  # a step that took twice or half of what was expected counts as that


class LearnedContention:
    """Owns the contention of one worker: the slope of the logarithm of measured over predicted by busy neighbours.

    Both count as they differ from their means over the last steps. So a machine that became slower is no neighbour, nor
    is a model that is wrong; who always has busy neighbours, or never, tells nothing of them.
    """

    def __init__(self, forgetting: float, mean_forgetting: float) -> None:
        """`forgetting`: the weight of a step once there is a next one that differs as much from the mean;
        `mean_forgetting`: its weight in the means once there is any next one."""
        self._forgetting = forgetting
        self._mean_forgetting = mean_forgetting
        self._num = 0.0  # steps that the means are of
        self._mean_share = self._mean_log = 0.0
        self._squares = self._products = 0.0  # of the differences from them
        self._slope = 0.0

    @property
    def factor(self) -> float:
        """What one busy neighbour adds, as a share of the time alone."""
        return min(math.expm1(self._slope), _MOST)

    def slowdown(self, num_busy: float) -> float:
        """Times the time alone."""
        return 1 + self.factor * num_busy

    def observe(self, ratios: Sequence[float], num_busy: Sequence[float]) -> None:
        """Steps: measured over predicted for a worker alone, above 0, and how many neighbours were busy meanwhile."""
        for ratio, busy in zip(ratios, num_busy, strict=True):
            share, beside_one = min(busy, 1.0), math.log1p(self.factor)
            log_ratio = math.log(ratio / (1 + self.factor * busy)) + beside_one * share  # as if that share of one was
            if self._num:
                expected = self._mean_log + beside_one * (share - self._mean_share)
                log_ratio = min(max(log_ratio, expected - _SURPRISE), expected + _SURPRISE)
                self._fit(share - self._mean_share, log_ratio - self._mean_log)
            self._num = self._num * self._mean_forgetting + 1
            self._mean_share += (share - self._mean_share) / self._num
            self._mean_log += (log_ratio - self._mean_log) / self._num

    def rescale(self, times: float) -> None:
        """From now on predictions are so many times what they were."""
        self._mean_log -= math.log(times)

    def _fit(self, share: float, log_ratio: float) -> None:
        kept = self._forgetting ** abs(share)
        self._squares = self._squares * kept + share**2
        self._products = self._products * kept + share * log_ratio
        self._slope = max(self._products / (self._squares + _PRIOR), 0.0)
