"""Evaluates a layout at a rate: attainment, latencies, sensitivity to traffic and lengths, and its goodput."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from halfmoon.plan.layout import Layout, WorkerKind
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.bisect import Bisection, highest_feasible
from halfmoon.plan.search.goodput import ESTIMATES_EXCEEDED, Trial, about_holds, fails_at_first, held_at, steady_at
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.result import Attainment, SimResult, quantiles

MORE_TRAFFIC, LONGER = 1.2, 1.5
_ESTIMATES_WITHIN = 1.05
_LESS = 1.01  # factor between estimate and goodput with policies, in most cases


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures at one rate of the whole layout. Quantiles: mean, p50, p90, p99 in seconds; None without data.

    - keeps_up: queues do not grow. If they do, attainment falls the longer it goes on.
    - tbt_s: of each request's longest gap, or the mean of the longest tenth, as in the target.
    """

    rate_per_s: float
    attainment: Attainment
    ttft_s: dict[str, float | None]
    tpot_s: dict[str, float | None]
    tbt_s: dict[str, float | None]
    keeps_up: bool


def evaluate(trial: Trial, rate_per_s: float, num_units: int = 1) -> Evaluation:
    """Evaluates `num_units` copies of the trial's cluster, each with an equal share of the rate."""
    steady = steady_at(trial, rate_per_s / num_units)
    return _evaluation(trial, rate_per_s, steady.result, steady.keeps_up)


def verified_evaluation(trial: Trial, rate_per_s: float, num_units: int, num_first: int) -> Evaluation | None:
    """Evaluates a rate that is held; None if it is not. The first requests may show that sooner."""
    if fails_at_first(trial, rate_per_s / num_units, num_first):
        return None
    result = held_at(trial, rate_per_s / num_units)
    return None if result is None else _evaluation(trial, rate_per_s, result, keeps_up=True)


def estimated_evaluation(trial: Trial, rate_per_s: float, num_units: int) -> Evaluation | None:
    """Evaluates a slightly lower rate with least-loaded routing. Policies that hold the requested rate hold this one;
    None if it is not held.
    """
    least_per_s = rate_per_s / ESTIMATES_EXCEEDED
    result = held_at(trial, least_per_s / num_units, "never")
    return None if result is None else _evaluation(trial, least_per_s, result, keeps_up=True)


def _evaluation(trial: Trial, rate_per_s: float, result: SimResult, keeps_up: bool) -> Evaluation:
    targets = trial.goal.targets
    gap_s = result.longest_gap_s if targets.tbt_of == "longest" else result.tail_gap_s
    return Evaluation(
        rate_per_s,
        result.attainment(targets),
        quantiles(result.ttft_s),
        quantiles(result.tpot_s),
        quantiles(gap_s),
        keeps_up,
    )


def estimated_per_s(trial: Trial, guess_per_s: float, num_units: int, least_per_s: float = 0.0) -> float | None:
    """Estimated goodput of `num_units` copies of the trial's cluster; None if it is too low for policies to hold
    `least_per_s`. Rates cover all units.
    """

    def is_held(rate_per_s: float) -> bool | None:
        return about_holds(trial, rate_per_s / num_units) or None

    least_per_s /= ESTIMATES_EXCEEDED
    if least_per_s and not is_held(least_per_s):
        return None
    bisection = highest_feasible(is_held, guess_per_s, _ESTIMATES_WITHIN, least=least_per_s, at_least=True)
    return None if bisection is None else bisection.value


def verified_per_s(trial: Trial, estimate_per_s: float) -> float:
    """The rate that verifies an estimate. Policies hold slightly less than estimates if they have a choice."""
    return estimate_per_s if trial.has_single_route else estimate_per_s / _LESS


def held_goodput(
    trial: Trial,
    guess_per_s: float,
    num_units: int,
    num_first: int,
    tolerance: float,
    least_per_s: float,
    most_per_s: float = math.inf,
    at_least: Evaluation | None = None,
) -> Bisection[Evaluation] | None:
    """Goodput of `num_units` copies of the trial's cluster with its evaluation, searched from a guess on; None if it is
    below `least_per_s`.

    The search stops at `most_per_s`. `at_least` is the evaluation at `least_per_s`, if there is one. Rates cover all
    units.
    """

    def held(rate_per_s: float) -> Evaluation | None:
        return verified_evaluation(trial, rate_per_s, num_units, num_first)

    most_per_s = max(most_per_s, least_per_s)
    return highest_feasible(
        held, guess_per_s or least_per_s, tolerance, least=least_per_s, most=most_per_s, at_least=at_least
    )


def what_ifs(
    problem: PlanningProblem, models: Mapping[WorkerKind, LatencyModel], layout: Layout, rate_per_s: float
) -> dict[str, tuple[Trial, float, int]]:
    """Arguments of `evaluate` for a fifth more traffic, and for answers or prompts half as long again."""
    trial, units = layout_trial(problem, models, layout), layout.num_units
    workload = problem.workload
    outputs, prompts = (
        np.ceil(LONGER * one).astype(np.int64) for one in (workload.output_tokens, workload.prompt_tokens)
    )
    longer = {
        "outputs +50 %": replace(trial, workload=replace(workload, output_tokens=outputs)),
        "prompts +50 %": replace(trial, workload=replace(workload, prompt_tokens=prompts)),
    }
    return {
        "traffic +20 %": (trial, rate_per_s * MORE_TRAFFIC, units),
        **{name: (one, rate_per_s, units) for name, one in longer.items()},
    }
