"""The goodput of one layout at all targets of a map, from a handful of simulated rates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from halfmoon.plan.search.goodput import Trial, estimated_steady_at
from halfmoon.plan.targets.target_grid import TargetGrid
from halfmoon.sim.workloads.workload import Floats

_STEP = 1.3  # ratio of two rates at first
_FINEST = 1.07  # ratio at which rates are close enough
_STEEP = 0.1  # a smaller fall of attainment between two rates is taken as a straight line
_LEAST = 1 / 50  # of the guess; goodput below that counts as none
_MOST = 16.0  # of the guess


@dataclass(frozen=True, slots=True)
class SurfaceTrial:
    """One unit of a layout under the requests of a map. Plain data, so it may run in another process.

    trial: its goal has the loosest targets of the grid and the share of requests that must meet each cell's.
    guess_per_s: where the search begins.
    floor_per_s: goodput at or below this does not matter, in each cell: [num_ttfts, num_tpots].
    """

    trial: Trial
    grid: TargetGrid
    guess_per_s: float
    floor_per_s: Floats


def goodput_surface(of: SurfaceTrial) -> Floats:
    """The highest rate of one unit that meets each cell's targets: [num_ttfts, num_tpots]; 0 where there is none above
    the floor.

    Requests go to the least loaded workers. Rates are searched from the guess upwards until no cell is met, downwards
    until all are, and in between where attainment falls steeply; between two rates it is interpolated.
    """
    rates = _Rates(of)
    rate_per_s = of.guess_per_s
    while rate_per_s < _MOST * of.guess_per_s and rates.meets_any(rate_per_s):
        rate_per_s *= _STEP
    rate_per_s = of.guess_per_s
    while rate_per_s > _LEAST * of.guess_per_s and rates.has_open(rate_per_s):
        rate_per_s /= _STEP
    while (between := rates.next_between()) is not None:
        rates.shares(between)
    return rates.goodput()


class _Rates:
    """Owns the attainment of each rate that was simulated: [num_ttfts, num_tpots]. A rate that is not sustained
    attains nothing.
    """

    def __init__(self, of: SurfaceTrial) -> None:
        self._of = of
        self._goal = of.trial.goal.attainment
        self._shares: dict[float, Floats] = {}

    def shares(self, rate_per_s: float) -> Floats:
        """The attainment at a rate."""
        if rate_per_s not in self._shares:
            steady = estimated_steady_at(self._of.trial, rate_per_s)
            shares = self._of.grid.attainment(steady.result, self._of.trial.goal.criterion)
            self._shares[rate_per_s] = shares if steady.keeps_up else np.zeros_like(shares)
        return self._shares[rate_per_s]

    def meets_any(self, rate_per_s: float) -> bool:
        """Whether some cell's targets are met."""
        wanted = np.isfinite(self._of.floor_per_s)
        return bool(wanted.any() and (self.shares(rate_per_s) >= self._goal)[wanted].any())

    def has_open(self, rate_per_s: float) -> bool:
        """Whether a lower rate could be some cell's goodput."""
        above = self._of.floor_per_s < rate_per_s
        return bool(above.any() and (self.shares(rate_per_s) < self._goal)[above].any())

    def next_between(self) -> float | None:
        """A rate in the middle of two where a cell's attainment falls steeply through the goal; None: no such."""
        rates = sorted(self._shares)
        for low, high in pairwise(rates):
            if high / low <= _FINEST:
                continue
            above, below = self._shares[low], self._shares[high]
            crosses = (above >= self._goal) & (below < self._goal) & (self._of.floor_per_s < high)
            if (crosses & (above - below > _STEEP)).any():
                return math.sqrt(low * high)
        return None

    def goodput(self) -> Floats:
        """The rate at which each cell's attainment falls through the goal."""
        rates = sorted(self._shares)
        found = np.zeros(self._of.grid.shape)
        for low, high in zip(rates, [*rates[1:], *rates[-1:]], strict=True):
            above, below = self._shares[low], self._shares[high]
            with np.errstate(invalid="ignore", divide="ignore"):
                part = np.where(above > below, (above - self._goal) / (above - below), 0.0)
            crosses = (above >= self._goal) & ((below < self._goal) | (high == low))
            found = np.where(crosses, low * (high / low) ** np.clip(part, 0.0, 1.0), found)
        return np.where(found > self._of.floor_per_s, found, 0.0)


def loosest(trial: Trial, grid: TargetGrid) -> Trial:
    """The trial with the loosest targets of the grid: a run ends early only if half of the requests miss those."""
    targets = replace(trial.goal.targets, ttft_s=grid.ttfts_s[-1], tpot_s=grid.tpots_s[-1], tbt_s=None)
    return replace(trial, goal=replace(trial.goal, targets=targets))
