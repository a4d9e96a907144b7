"""How much a cluster holds for ever: the highest rate at which enough requests meet their targets and no queue grows.

A short run flatters: it begins with an empty cluster, and may end before a queue that grows is long enough to be late.
So the requests come in passes, again and again, until the cluster is as full at the end of a pass as at the end of the
one before. Since passes are alike, what it is fuller by is what it cannot keep up with. Every pass up to that one has
to meet the goal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from halfmoon.sim.cluster import ClusterSpec, Targets
from halfmoon.sim.misses import Misses
from halfmoon.sim.result import Criterion, SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workload import Workload

MOST_OVERLOAD = 0.03  # of the requests of a pass, that may be inside after it beyond those inside before it
_STAYS = 4  # that passes may last in all, each as long as a request inside that meets its targets, until steady
_MOST_PASSES = 64
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

    def most_misses(self, num_requests: int) -> int:
        """Of so many requests; with one more the goal is missed."""
        return num_requests - math.ceil(self.attainment * num_requests - _ROUNDING)

    def stay_s(self, workload: Workload) -> float:
        """How long a request of mean length is inside that just meets its targets."""
        limits = self.targets.ttft_s or 0.0, (float(workload.output_tokens.mean()) - 1) * self.gap_s
        return sum(one for one in limits if math.isfinite(one))


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One cluster and what is asked of it. Everything is a value: it may run in another process."""

    spec: ClusterSpec
    workload: Workload
    goal: Goal
    seed: int = 0

    def brief(self, num_requests: int) -> Trial:
        """The first requests alone; where these are not all, twice as many may miss the goal."""
        if num_requests >= len(self.workload):
            return self
        relaxed = replace(self.goal, attainment=max(2 * self.goal.attainment - 1, 0.01))
        return replace(self, workload=self.workload.first(num_requests), goal=relaxed)


class Steady(NamedTuple):
    """The requests of the pass that counts, and whether the cluster keeps up with what comes."""

    result: SimResult
    keeps_up: bool


def steady_at(trial: Trial, rate_per_s: float) -> Steady:
    """The trial's requests at another rate, until the cluster is as full as it will be, or half of them are late."""
    num = len(trial.workload)
    misses, result = _run(trial, rate_per_s, num // 2, waits_for_all=True)
    ends = (misses.full_pass, misses.steady_pass, (len(result.start_s) - 1) // num)
    number = next(one for one in ends if one is not None)
    return Steady(result.rows(number * num, (number + 1) * num), misses.steady_pass == number)


def holds(trial: Trial, rate_per_s: float) -> bool:
    """Whether the goal is met at a rate, without end. The simulation ends as soon as that is known."""
    misses, _ = _run(trial, rate_per_s, trial.goal.most_misses(len(trial.workload)))
    return misses.full_pass is None and misses.steady_pass is not None


def holds_at_first(trial: Trial, rate_per_s: float) -> bool:
    """Whether the goal is met by requests that come once, to an empty cluster: what holds does so at first, too."""
    workload = trial.workload.at_rate(rate_per_s)
    goal, has_tbt = trial.goal, trial.goal.targets.tbt_s is not None
    misses = Misses(goal.targets, goal.criterion, goal.most_misses(len(workload)))
    simulate(trial.spec, workload, trial.seed, misses=misses, with_gaps=has_tbt)
    return misses.full_pass is None


def holds_after(trial: Trial, rate_per_s: float, num_first: int) -> bool:
    """As `holds`, after a look at the first requests, which say of most rates that are not held that they are not."""
    first = trial.brief(num_first)
    return (first is trial or holds_at_first(first, rate_per_s)) and holds(trial, rate_per_s)


def _run(trial: Trial, rate_per_s: float, most: int, *, waits_for_all: bool = False) -> tuple[Misses, SimResult]:
    goal, once = trial.goal, trial.workload.at_rate(rate_per_s)
    num, length_s = len(once), once.duration_s + 1 / rate_per_s
    num_passes = min(2 + math.ceil(_STAYS * goal.stay_s(once) / length_s), _MOST_PASSES)
    lasts_s = [once.duration_s + number * length_s for number in range(num_passes)]
    most_more = max(MOST_OVERLOAD * num, 1.0)
    misses = Misses(goal.targets, goal.criterion, most, lasts_s, num, most_more, waits_for_all=waits_for_all)
    has_tbt = goal.targets.tbt_s is not None
    result = simulate(trial.spec, once.repeated(num_passes), trial.seed, misses=misses, with_gaps=has_tbt)
    return misses, result


def goodput_per_s(
    trial: Trial,
    guess_per_s: float,
    least_per_s: float = 0.0,
    tolerance: float = 1.02,
    held: Callable[[Trial, float], bool] = holds,
) -> float:
    """The highest rate that meets the goal, within a factor of `tolerance`; 0 where none does.

    It is looked for from a guess on: the nearer that is, the fewer rates are simulated. What does not even hold
    `least_per_s` counts as 0.
    """
    if least_per_s and not held(trial, least_per_s):
        return 0.0
    low = high = max(guess_per_s, least_per_s)
    is_rising = held(trial, low)
    step = tolerance**2
    for _ in range(_MOST_STEPS):
        if is_rising:
            low, high = high, step * high
        else:
            low, high = low / step, low
        if not is_rising and low <= least_per_s:
            low = least_per_s
            break
        if held(trial, high if is_rising else low) != is_rising:
            break
        step *= step
    else:
        return high if is_rising else 0.0
    while high / low > tolerance:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if held(trial, middle) else (low, middle)
    return low
