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
from typing import Literal, NamedTuple

from halfmoon.plan.search.bisect import highest
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, SloTargets
from halfmoon.sim.result import Criterion, SimResult
from halfmoon.sim.routers.choose_router import PoliciesAsked
from halfmoon.sim.routers.least_loaded import LeastLoadedRouter
from halfmoon.sim.routers.single_route import SingleRouteRouter
from halfmoon.sim.simulation import simulate
from halfmoon.sim.slo_tracker import SloTracker
from halfmoon.sim.workloads.workload import Workload

MOST_OVERLOAD = 0.03  # of the requests of a pass, that may be inside after it beyond those inside before it
_STAYS = 4  # that passes may last in all, each as long as a request inside that meets its targets, until steady
_MOST_PASSES = 64
_MOST_UNDER_WAY = 0.01  # of a pass: the last ones take as long as all others, and count as they are
_LOOK = 4  # times as long as a first look a pass has to be, for the look to pay
_ROUNDING = 1e-9

ESTIMATES_EXCEEDED = 1.05
"""By which policies may hold more than an estimate says, where there are estimates."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What every request is promised, and for how many of them it must come true."""

    targets: SloTargets
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

    @property
    def is_of_one_way(self) -> bool:
        """Whether there is nothing to choose: an estimate is what policies hold, and takes as long."""
        return SingleRouteRouter.is_enough(self.spec)

    @property
    def has_estimates(self) -> bool:
        """Whether requests that go to the lightest worker tell about what policies hold: it knows no prefixes."""
        return self.workload.prefixes is None and LeastLoadedRouter.is_possible(self.spec)

    @property
    def has_choice(self) -> bool:
        """Whether policies choose, and the lightest worker is about what they do: it fills the cluster for them."""
        return self.has_estimates and not self.is_of_one_way

    def brief(self, num_requests: int) -> Trial:
        """The first requests alone; where these are not all, twice as many may miss the goal."""
        if num_requests >= len(self.workload):
            return self
        relaxed = replace(self.goal, attainment=max(2 * self.goal.attainment - 1, 0.01))
        return replace(self, workload=self.workload.first(num_requests), goal=relaxed)


class Steady(NamedTuple):
    """The requests of the pass that counts, and whether the cluster keeps up with what comes.

    counts: whether any pass does; where the cluster was to be filled first, it may not be held even by estimates.
    """

    result: SimResult
    keeps_up: bool
    counts: bool


def steady_at(trial: Trial, rate_per_s: float) -> Steady:
    """The trial's requests at another rate, until the cluster is as full as it will be, or half of them are late.

    What does not fill, and does not hold a little less than the rate either, is as estimated: policies are not asked.
    """
    num = len(trial.workload) // 2
    if trial.has_choice:
        found = _passes(trial, rate_per_s, num, _MOST_UNDER_WAY, "once full")
        if found.counts or not about_holds(trial, rate_per_s / ESTIMATES_EXCEEDED):
            return found
    return _passes(trial, rate_per_s, num, _MOST_UNDER_WAY)


def held_at(trial: Trial, rate_per_s: float, policies: PoliciesAsked = "as needed") -> SimResult | None:
    """The requests of the pass that counts, if the goal is met at a rate, without end; None if not: it ends as soon as
    that is known."""
    found = _held(trial, rate_per_s, _MOST_UNDER_WAY, policies)
    return found.result if found.keeps_up else None


def holds(trial: Trial, rate_per_s: float) -> bool:
    """Whether the goal is met at a rate, without end. The simulation ends as soon as that is known."""
    return _held(trial, rate_per_s, math.inf, "as needed").keeps_up


def about_holds(trial: Trial, rate_per_s: float) -> bool:
    """The same with requests that go to the lightest worker, whatever policies say: a tenth of the time."""
    return _held(trial, rate_per_s, math.inf, "never").keeps_up


def holds_at_first(trial: Trial, rate_per_s: float, policies: PoliciesAsked = "as needed") -> bool:
    """Whether the goal is met by requests that come once, to an empty cluster: what holds does so at first, too."""
    workload = trial.workload.at_rate(rate_per_s)
    goal, has_tbt = trial.goal, trial.goal.targets.tbt_s is not None
    misses = SloTracker(goal.targets, goal.criterion, goal.most_misses(len(workload)))
    simulate(trial.spec, workload, trial.seed, misses=misses, with_gaps=has_tbt, policies=policies)
    return misses.full_pass is None


def may_hold_at_first(trial: Trial, rate_per_s: float) -> bool:
    """The same, or what an estimate leaves open where there is one."""
    if trial.has_choice:
        return holds_at_first(trial, rate_per_s / ESTIMATES_EXCEEDED, "never")
    return holds_at_first(trial, rate_per_s)


def fails_at_first(trial: Trial, rate_per_s: float, num_first: int) -> bool:
    """Whether a look at the first requests says already that a rate is not held. None is taken at the larger part."""
    first = trial.brief(num_first)
    return _LOOK * len(first.workload) <= len(trial.workload) and not holds_at_first(first, rate_per_s)


def _held(trial: Trial, rate_per_s: float, most_under_way: float, policies: PoliciesAsked) -> Steady:
    """By policies in passes of a cluster that was filled without them, where there is a choice; what that does not
    fill they have to fill themselves.
    """
    most_misses = trial.goal.most_misses(len(trial.workload))
    if policies == "as needed" and trial.has_choice:
        found = _passes(trial, rate_per_s, most_misses, most_under_way, "once full")
        if found.counts:
            return found
    return _passes(trial, rate_per_s, most_misses, most_under_way, policies)


def _passes(
    trial: Trial,
    rate_per_s: float,
    most_misses: int,
    most_under_way: float = math.inf,
    policies: PoliciesAsked = "as needed",
) -> Steady:
    """The first pass that counts and is steady, or where there is none the one that more requests than that missed, or
    the last.

    It ends when at most that share of its requests is under way.
    """
    goal, once = trial.goal, trial.workload.at_rate(rate_per_s)
    num, length_s = len(once), once.duration_s + 1 / rate_per_s
    num_passes = min(2 + math.ceil(_STAYS * goal.stay_s(once) / length_s), _MOST_PASSES)
    is_filled_first, has_tbt = policies == "once full", goal.targets.tbt_s is not None
    misses = SloTracker(
        goal.targets,
        goal.criterion,
        most_misses,
        num_passes,
        num,
        max(MOST_OVERLOAD * num, 1.0),
        most_under_way * num,
        is_filled_first=is_filled_first,
    )
    requests = once.repeated(2 * num_passes if is_filled_first else num_passes)
    result = simulate(trial.spec, requests, trial.seed, misses=misses, with_gaps=has_tbt, policies=policies)
    steady = misses.steady_pass if misses.is_held else None
    number = next(one for one in (steady, misses.full_pass, (len(result.start_s) - 1) // num) if one is not None)
    counts = misses.stage != "filling"
    return Steady(result.rows(number * num, (number + 1) * num), steady is not None, counts)


def goodput_per_s(
    trial: Trial,
    guess_per_s: float,
    tolerance: float = 1.02,
    held: Callable[[Trial, float], bool] = holds,
    most_per_s: float = math.inf,
) -> float:
    """The highest rate that meets the goal, within a factor of `tolerance`; 0 where none does, at most `most_per_s`."""

    def is_held(rate_per_s: float) -> Literal[True] | None:
        return True if held(trial, rate_per_s) else None

    found = highest(is_held, guess_per_s, tolerance, most=most_per_s)
    return found.value if found else 0.0
