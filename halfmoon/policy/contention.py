"""How much slower a worker computes while its neighbours do: workers on one host share its cores and its memory.

    seconds = seconds alone * (1 + contention * busy neighbours)

What a step takes alone changes with the machine from minute to minute; by how much neighbours slow each other down does
not, so it is remembered longer. Workers that share nothing have a contention of 0, which is also the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_PRIOR_ALONE, _PRIOR_BESIDE = 2.0, 0.5  # steps that the start is worth: as predicted, and no slower
_MOST = 8.0  # times slower, beside one neighbour
_SURPRISE = math.log(2.0)  # a step that took twice or half of what was expected counts as that


@dataclass(slots=True)
class _Mean:
    """A mean that forgets."""

    forgetting: float  # weight of a step once there is a next one
    weight: float
    value: float = 0.0

    def add(self, value: float, weight: float) -> None:
        self.weight = self.weight * self.forgetting**weight + weight
        self.value += (value - self.value) * weight / self.weight


class Contention:
    """Owns the contention of one worker: how long its steps took against the prediction for a worker alone,
    apart for steps without and with busy neighbours. Both are means of logarithms, so that no single step counts much.
    """

    def __init__(self, forgetting: float) -> None:
        """`forgetting`: the weight of a step once there is a next one of its kind, alone or beside busy neighbours."""
        self._alone = _Mean(forgetting, _PRIOR_ALONE)
        self._beside = _Mean(forgetting, _PRIOR_BESIDE)

    @property
    def factor(self) -> float:
        """What one busy neighbour adds, as a share of the time alone."""
        return min(max(math.exp(self._beside.value - self._alone.value) - 1, 0.0), _MOST)

    def slowdown(self, num_busy: float) -> float:
        """Times the time alone."""
        return 1 + self.factor * num_busy

    def observe(self, ratios: Sequence[float], num_busy: Sequence[float]) -> None:
        """Steps: measured over predicted for a worker alone, above 0, and how many neighbours were busy meanwhile."""
        for ratio, busy in zip(ratios, num_busy, strict=True):
            factor, share = self.factor, min(busy, 1.0)
            rest = math.log(ratio / (1 + factor * busy))
            rest = min(max(rest, self._alone.value - _SURPRISE), self._alone.value + _SURPRISE)
            if share < 1:
                self._alone.add(rest, 1 - share)
            if share > 0:
                self._beside.add(rest + math.log1p(factor), share)
