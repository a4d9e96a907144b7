"""How a layout fares at the rate that it is for: who meets what, and what if traffic or answers grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from halfmoon.plan.goodput import Trial, simulate_at
from halfmoon.plan.layout import Layout, Parallelism
from halfmoon.plan.question import Question
from halfmoon.plan.search import layout_trial
from halfmoon.sim.latency import LatencyModel
from halfmoon.sim.result import Attainment, quantiles

MORE_TRAFFIC, LONGER_OUTPUTS = 1.2, 1.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """At one rate of the whole layout. Quantiles: mean, p50, p90, p99 in seconds; None where nothing is."""

    rate_per_s: float
    attainment: Attainment
    ttft_s: dict[str, float | None]
    tpot_s: dict[str, float | None]


def judged(trial: Trial, rate_per_s: float, num_units: int = 1) -> Verdict:
    """`num_units` times the trial's cluster, each with its share of the rate."""
    found = simulate_at(trial, rate_per_s / num_units)
    return Verdict(rate_per_s, found.attainment(trial.goal.targets), quantiles(found.ttft_s), quantiles(found.tpot_s))


def sensitivity(
    question: Question, known: Mapping[Parallelism, LatencyModel], layout: Layout, rate_per_s: float
) -> dict[str, Verdict]:
    """What becomes of a layout when there is a fifth more traffic, and when answers are half as long again."""
    trial = layout_trial(question, known, layout)
    longer = np.ceil(question.workload.output_tokens * LONGER_OUTPUTS).astype(np.int64)
    longer_trial = replace(trial, workload=replace(question.workload, output_tokens=longer))
    return {
        "traffic +20 %": judged(trial, rate_per_s * MORE_TRAFFIC, layout.num_units),
        "outputs +50 %": judged(longer_trial, rate_per_s, layout.num_units),
    }
