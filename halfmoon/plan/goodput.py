"""How much a cluster holds: the highest rate at which enough requests meet their targets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon.sim.cluster import ClusterSpec, Targets
from halfmoon.sim.misses import Misses
from halfmoon.sim.result import Criterion, SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workload import Workload

_MOST_STEPS = 8  # from the guess, each the square of the one before: then, far away, everything is held, or nothing
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Goal:
    """What every request is promised, and for how many of them it must come true."""

    targets: Targets
    attainment: float = 0.9
    criterion: Criterion = "joint"

    @property
    def gap_s(self) -> float:
        """The most that a request's mean gap may be: no mean is above the longest gaps."""
        limits = [one for one in (self.targets.tpot_s, self.targets.tbt_s) if one is not None]
        return min(limits, default=math.inf)

    def is_met(self, found: SimResult) -> bool:
        """Whether enough requests met it."""
        return found.attainment(self.targets).value(self.criterion) >= self.attainment

    def misses(self, num_requests: int) -> Misses:
        """A count that is full when so many requests cannot meet it any more."""
        least = math.ceil(self.attainment * num_requests - _ROUNDING)
        return Misses(self.targets, self.criterion, num_requests - least)


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One cluster and what is asked of it. Everything is a value: it may run in another process."""

    spec: ClusterSpec
    workload: Workload
    goal: Goal
    seed: int = 0


def simulate_at(trial: Trial, rate_per_s: float) -> SimResult:
    """The trial's requests at another rate."""
    has_tbt = trial.goal.targets.tbt_s is not None
    return simulate(trial.spec, trial.workload.at_rate(rate_per_s), trial.seed, with_gaps=has_tbt)


class Lateness(NamedTuple):
    """Of the requests that came before the goal was out of reach: whose first token, or others, were late."""

    first: int
    later: int


def lateness_at(trial: Trial, rate_per_s: float) -> Lateness | None:
    """None where the goal is met at a rate; else the simulation ends as soon as it cannot be."""
    workload = trial.workload.at_rate(rate_per_s)
    misses = trial.goal.misses(len(workload))
    has_tbt = trial.goal.targets.tbt_s is not None
    simulate(trial.spec, workload, trial.seed, misses=misses, with_gaps=has_tbt)
    return Lateness(misses.num_ttft, max(misses.num_tpot, misses.num_tbt)) if misses.is_full else None


def holds(trial: Trial, rate_per_s: float) -> bool:
    """Whether the goal is met at a rate."""
    return lateness_at(trial, rate_per_s) is None


def goodput_per_s(trial: Trial, guess_per_s: float, least_per_s: float = 0.0, tolerance: float = 1.02) -> float:
    """The highest rate that meets the goal, within a factor of `tolerance`; 0 where none does.

    It is looked for from a guess on: the nearer that is, the fewer rates are simulated. What does not even hold
    `least_per_s` counts as 0.
    """
    if least_per_s and not holds(trial, least_per_s):
        return 0.0
    low = high = max(guess_per_s, least_per_s)
    is_rising = holds(trial, low)
    step = tolerance**2
    for _ in range(_MOST_STEPS):
        if is_rising:
            low, high = high, step * high
        else:
            low, high = low / step, low
        if not is_rising and low <= least_per_s:
            low = least_per_s
            break
        if holds(trial, high if is_rising else low) != is_rising:
            break
        step *= step
    else:
        return high if is_rising else 0.0
    while high / low > tolerance:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(trial, middle) else (low, middle)
    return low
