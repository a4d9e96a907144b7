"""Attainment of layouts at rates around their goodput: the data of a plan's plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from halfmoon.plan.layout import Layout, WorkerKind
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.evaluation import evaluate
from halfmoon.plan.search.objective import Rated
from halfmoon.plan.search.search import Progress
from halfmoon.sim.latency_sources.latency_model import LatencyModel

_FACTORS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)  # of a layout's goodput; denser where attainment falls


@dataclass(frozen=True, slots=True)
class Curve:
    """One layout: the share of requests that meet the goal at each rate, in ascending order."""

    layout: Layout
    rates_per_s: tuple[float, ...]
    attainments: tuple[float, ...]


def curves(
    problem: PlanningProblem,
    models: Mapping[WorkerKind, LatencyModel],
    shown: Sequence[Rated],
    pool: Executor,
    on_progress: Progress = lambda what, done, total: None,
) -> list[Curve]:
    """The curve of each layout. A requested rate is among its rates."""
    points = [(rated, rate) for rated in shown for rate in _rates(problem, rated)]
    trials = [layout_trial(problem, models, one.layout) for one, _ in points]
    units = [one.layout.num_units for one, _ in points]
    shares: dict[Rated, list[float]] = {rated: [] for rated in shown}
    result = pool.map(evaluate, trials, [rate for _, rate in points], units)
    for done, ((one, _), evaluation) in enumerate(zip(points, result, strict=True), start=1):
        shares[one].append(evaluation.attainment.value(problem.goal.criterion))
        on_progress("curves", done, len(points))
    return [Curve(rated.layout, tuple(_rates(problem, rated)), tuple(shares[rated])) for rated in shown]


def _rates(problem: PlanningProblem, rated: Rated) -> list[float]:
    asked = () if problem.rate_per_s is None else (problem.rate_per_s,)
    return sorted({*(factor * rated.goodput_per_s for factor in _FACTORS), *asked})
