"""Sustained goodput: the highest rate at which enough requests meet their targets and no queue grows.

A short run flatters: it begins with an empty cluster, and may end before a growing queue makes requests late. So the
requests arrive in passes, again and again, until a pass leaves the cluster as full as the pass before. Passes are
alike, so any growth is load that the cluster cannot keep up with. Every pass up to that one must meet the goal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from halfmoon.plan.search.bisect import highest_feasible
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, SloTargets
from halfmoon.sim.result import Criterion, SimResult
from halfmoon.sim.routers.choose_router import PolicyUse
from halfmoon.sim.routers.least_loaded import LeastLoadedRouter
from halfmoon.sim.routers.single_route import SingleRouteRouter
from halfmoon.sim.simulation import simulate
from halfmoon.sim.slo_tracker import SloTracker
from halfmoon.sim.workloads.workload import Workload

MOST_OVERLOAD = 0.03  # growth of the number of requests inside, as a share of a pass
_RESIDENCES = 4  # limit of all passes, in times that a request spends inside while it meets its targets
_MOST_PASSES = 64
_MAX_UNDER_WAY = 0.01  # of a pass; the last requests take as long as all others, and count as they are
_LOOK = 4  # minimum ratio of a pass to a first look, for the look to pay off
_ROUNDING = 1e-9

ESTIMATES_EXCEEDED = 1.05
"""Factor by which policies may exceed an estimate."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The targets of every request, and the share of requests that must meet them."""

    targets: SloTargets
    attainment: float = 0.9
    criterion: Criterion = "joint"

    @property
    def gap_s(self) -> float:
        """The limit of a request's mean gap, which never exceeds its longest gap."""
        limits = [one for one in (self.targets.tpot_s, self.targets.tbt_s) if one is not None]
        return min(limits, default=math.inf)

    def max_misses(self, num_requests: int) -> int:
        """The number of misses that the goal allows among `num_requests`."""
        return num_requests - math.ceil(self.attainment * num_requests - _ROUNDING)

    def residence_s(self, workload: Workload) -> float:
        """Time that a request of mean length spends inside if it just meets its targets."""
        limits = self.targets.ttft_s or 0.0, (float(workload.output_tokens.mean()) - 1) * self.gap_s
        return sum(limit for limit in limits if math.isfinite(limit))


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One cluster and its requests. All of it is plain data, so it may run in another process."""

    spec: ClusterSpec
    workload: Workload
    goal: Goal
    seed: int = 0

    @property
    def has_single_route(self) -> bool:
        """Whether there is a single route. An estimate then equals the result, and takes as long."""
        return SingleRouteRouter.is_enough(self.spec)

    @property
    def has_estimates(self) -> bool:
        """Whether least-loaded routing estimates what policies hold. It does not know prefixes."""
        return self.workload.prefixes is None and LeastLoadedRouter.is_possible(self.spec)

    @property
    def has_choice(self) -> bool:
        """Whether policies have a choice that least-loaded routing approximates, so that it can fill the cluster for
        them.
        """
        return self.has_estimates and not self.has_single_route

    def first_look(self, num_requests: int) -> Trial:
        """The first requests alone. Unless these are all requests, twice as many may miss the goal."""
        if num_requests >= len(self.workload):
            return self
        relaxed = replace(self.goal, attainment=max(2 * self.goal.attainment - 1, 0.01))
        return replace(self, workload=self.workload.first(num_requests), goal=relaxed)


class Steady(NamedTuple):
    """The requests of the pass that counts, and whether the cluster keeps up.

    counts: whether any pass counts. A cluster to be filled first may not even hold the rate by estimates.
    """

    result: SimResult
    keeps_up: bool
    counts: bool


def steady_at(trial: Trial, rate_per_s: float) -> Steady:
    """Simulates the trial's requests at a rate until the cluster is in a steady state, or half of them are late.

    If filling fails, and estimates do not hold a slightly lower rate either, policies are not asked.
    """
    num = len(trial.workload) // 2
    if trial.has_choice:
        steady = _passes(trial, rate_per_s, num, _MAX_UNDER_WAY, "once full")
        if steady.counts or not about_holds(trial, rate_per_s / ESTIMATES_EXCEEDED):
            return steady
    return _passes(trial, rate_per_s, num, _MAX_UNDER_WAY)


def estimated_steady_at(trial: Trial, rate_per_s: float) -> Steady:
    """The same with least-loaded routing."""
    return _passes(trial, rate_per_s, len(trial.workload) // 2, _MAX_UNDER_WAY, "never")


def held_at(trial: Trial, rate_per_s: float, policies: PolicyUse = "as needed") -> SimResult | None:
    """The requests of the pass that counts if the goal is met indefinitely, else None. Stops as soon as that is
    decided.
    """
    steady = _held(trial, rate_per_s, _MAX_UNDER_WAY, policies)
    return steady.result if steady.keeps_up else None


def holds(trial: Trial, rate_per_s: float) -> bool:
    """Whether the goal is met indefinitely. Stops as soon as that is decided."""
    return _held(trial, rate_per_s, math.inf, "as needed").keeps_up


def about_holds(trial: Trial, rate_per_s: float) -> bool:
    """The same with least-loaded routing, in a tenth of the time."""
    return _held(trial, rate_per_s, math.inf, "never").keeps_up


def holds_at_first(trial: Trial, rate_per_s: float, policies: PolicyUse = "as needed") -> bool:
    """Whether requests that arrive once, in an empty cluster, meet the goal. This is necessary for holding the rate."""
    workload = trial.workload.at_rate(rate_per_s)
    goal, has_tbt = trial.goal, trial.goal.targets.tbt_s is not None
    tracker = SloTracker(goal.targets, goal.criterion, goal.max_misses(len(workload)))
    simulate(trial.spec, workload, trial.seed, tracker=tracker, with_gaps=has_tbt, policies=policies)
    return tracker.full_pass is None


def may_hold_at_first(trial: Trial, rate_per_s: float) -> bool:
    """The same, or an estimate that leaves room for error if there is one."""
    if trial.has_choice:
        return holds_at_first(trial, rate_per_s / ESTIMATES_EXCEEDED, "never")
    return holds_at_first(trial, rate_per_s)


def fails_at_first(trial: Trial, rate_per_s: float, num_first: int) -> bool:
    """Whether the first requests already show that a rate is not held. Skipped if they would be a large part of all."""
    first = trial.first_look(num_first)
    return _LOOK * len(first.workload) <= len(trial.workload) and not holds_at_first(first, rate_per_s)


def _held(trial: Trial, rate_per_s: float, max_under_way: float, policies: PolicyUse) -> Steady:
    """Lets policies place passes in a cluster filled without them, if they have a choice. If that does not fill it,
    they place every pass.
    """
    max_misses = trial.goal.max_misses(len(trial.workload))
    if policies == "as needed" and trial.has_choice:
        steady = _passes(trial, rate_per_s, max_misses, max_under_way, "once full")
        if steady.counts:
            return steady
    return _passes(trial, rate_per_s, max_misses, max_under_way, policies)


def _passes(
    trial: Trial,
    rate_per_s: float,
    max_misses: int,
    max_under_way: float = math.inf,
    policies: PolicyUse = "as needed",
) -> Steady:
    """The first counted pass that is steady; otherwise the one with more than `max_misses`, or the last one.

    The run ends once at most a share `max_under_way` of its requests is still running.
    """
    goal, once = trial.goal, trial.workload.at_rate(rate_per_s)
    num, length_s = len(once), once.duration_s + 1 / rate_per_s
    num_passes = min(2 + math.ceil(_RESIDENCES * goal.residence_s(once) / length_s), _MOST_PASSES)
    is_filled_first, has_tbt = policies == "once full", goal.targets.tbt_s is not None
    tracker = SloTracker(
        goal.targets,
        goal.criterion,
        max_misses,
        num_passes,
        num,
        max(MOST_OVERLOAD * num, 1.0),
        max_under_way * num,
        is_filled_first=is_filled_first,
    )
    requests = once.repeated(2 * num_passes if is_filled_first else num_passes)
    result = simulate(trial.spec, requests, trial.seed, tracker=tracker, with_gaps=has_tbt, policies=policies)
    steady = tracker.steady_pass if tracker.is_held else None
    number = next(one for one in (steady, tracker.full_pass, (len(result.start_s) - 1) // num) if one is not None)
    counts = tracker.stage != "filling"
    return Steady(result.rows(number * num, (number + 1) * num), steady is not None, counts)


def goodput_per_s(
    trial: Trial,
    guess_per_s: float,
    tolerance: float = 1.02,
    held: Callable[[Trial, float], bool] = holds,
    most_per_s: float = math.inf,
) -> float:
    """The highest rate that meets the goal, within a factor of `tolerance`, up to `most_per_s`; 0 if there is none."""

    def is_held(rate_per_s: float) -> Literal[True] | None:
        return True if held(trial, rate_per_s) else None

    bisection = highest_feasible(is_held, guess_per_s, tolerance, most=most_per_s)
    return bisection.value if bisection else 0.0
