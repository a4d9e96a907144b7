"""How a layout fares at the rate that it is for: who meets what, and what if traffic or answers grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from halfmoon.plan.layout import Layout, WorkerKind
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.goodput import ESTIMATES_EXCEEDED, Trial, fails_at_first, held_at, steady_at
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.result import Attainment, SimResult, quantiles

MORE_TRAFFIC, LONGER = 1.2, 1.5


@dataclass(frozen=True, slots=True)
class Evaluation:
    """At one rate of the whole layout. Quantiles: mean, p50, p90, p99 in seconds; None where nothing is.

    - keeps_up: queues do not grow. Where they do, fewer and fewer requests are in time, the longer it goes on.
    - tbt_s: of each request's longest gap, or the mean of the longest tenth, whichever the target is of.
    """

    rate_per_s: float
    attainment: Attainment
    ttft_s: dict[str, float | None]
    tpot_s: dict[str, float | None]
    tbt_s: dict[str, float | None]
    keeps_up: bool


def judged(trial: Trial, rate_per_s: float, num_units: int = 1) -> Evaluation:
    """`num_units` times the trial's cluster, each with its share of the rate."""
    found = steady_at(trial, rate_per_s / num_units)
    return _verdict(trial, rate_per_s, found.result, found.keeps_up)


def verified_evaluation(trial: Trial, rate_per_s: float, num_units: int, num_first: int) -> Evaluation | None:
    """The same of a rate that is held; None where it is not. A look at the first requests may tell that sooner."""
    if fails_at_first(trial, rate_per_s / num_units, num_first):
        return None
    found = held_at(trial, rate_per_s / num_units)
    return None if found is None else _verdict(trial, rate_per_s, found, keeps_up=True)


def estimated_evaluation(trial: Trial, rate_per_s: float, num_units: int) -> Evaluation | None:
    """The same with requests that go to the lightest worker, at a rate that policies hold if they hold the asked one;
    None where they do not."""
    least_per_s = rate_per_s / ESTIMATES_EXCEEDED
    found = held_at(trial, least_per_s / num_units, "never")
    return None if found is None else _verdict(trial, least_per_s, found, keeps_up=True)


def _verdict(trial: Trial, rate_per_s: float, found: SimResult, keeps_up: bool) -> Evaluation:
    targets = trial.goal.targets
    gap_s = found.longest_gap_s if targets.tbt_of == "longest" else found.tail_gap_s
    return Evaluation(
        rate_per_s,
        found.attainment(targets),
        quantiles(found.ttft_s),
        quantiles(found.tpot_s),
        quantiles(gap_s),
        keeps_up,
    )


def what_ifs(
    question: PlanningProblem, known: Mapping[WorkerKind, LatencyModel], layout: Layout, rate_per_s: float
) -> dict[str, tuple[Trial, float, int]]:
    """The arguments of `judged`: a fifth more traffic, answers or prompts half as long again."""
    trial, units = layout_trial(question, known, layout), layout.num_units
    workload = question.workload
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
