"""How much a cluster holds: the highest rate at which enough requests meet their targets."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.sim.cluster import ClusterSpec, Targets
from halfmoon.sim.result import Criterion, SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workload import Workload

_FIRST_STEP = 1.25  # from the guess; each further step is the square of the one before
_MOST_STEPS = 6  # after which, a million times away, everything is held, or nothing


@dataclass(frozen=True, slots=True)
class Goal:
    """What every request is promised, and for how many of them it must come true."""

    targets: Targets
    attainment: float = 0.9
    criterion: Criterion = "joint"

    def is_met(self, found: SimResult) -> bool:
        """Whether enough requests met it."""
        return found.attainment(self.targets).value(self.criterion) >= self.attainment


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One cluster and what is asked of it. Everything is a value: it may run in another process."""

    spec: ClusterSpec
    workload: Workload
    goal: Goal
    seed: int = 0


def simulate_at(trial: Trial, rate_per_s: float) -> SimResult:
    """The trial's requests at another rate."""
    return simulate(trial.spec, trial.workload.at_rate(rate_per_s), trial.seed)


def goodput_per_s(trial: Trial, guess_per_s: float, tolerance: float = 1.02) -> float:
    """The highest rate that meets the goal, within a factor of `tolerance`; 0 where none does.

    It is looked for from a guess on: the nearer that is, the fewer rates are simulated.
    """

    def holds(rate_per_s: float) -> bool:
        return trial.goal.is_met(simulate_at(trial, rate_per_s))

    low = high = guess_per_s
    is_rising = holds(guess_per_s)
    step = _FIRST_STEP
    for _ in range(_MOST_STEPS):
        if is_rising:
            low, high = high, step * high
        else:
            low, high = low / step, low
        if holds(high if is_rising else low) != is_rising:
            break
        step *= step
    else:
        return high if is_rising else 0.0
    while high / low > tolerance:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
